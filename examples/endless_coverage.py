"""How often the 90 % intervals of a probe for more text cover the value on much more text.

``python examples/endless_coverage.py laws [REPEATS] [KEYS]``: heads on tokens of laws whose limit
is known. Pools of KEYS tokens (16384 by default) are drawn REPEATS times (500 by default). The true
values are a closed form for Gaussian tokens, and come from a million tokens for the other laws.

``python examples/endless_coverage.py text MODEL FILE|prose|code|legal [POOL ...]``: every head,
probed on pools of 4096 and 16384 tokens (or POOL ...) of one text, against a pool of 240,000 tokens
with 512 queries.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from scipy import stats

import esscher as es
from esscher.errors.more_text import BEYOND, PIECES
from esscher.probe.curves import headline_numbers, read_numbers
from esscher.probe.session import Queries, spread
from esscher.probe.spec import ProbeSpec, drawn_ladder
from esscher.probe.statistic import HeadEnd, HeadView, LayerInfo
from esscher.probe.statistics.errors import Draws
from esscher.probe.statistics.more_text import MoreText

SPEC = ProbeSpec(pool="corpus", kept_queries=64)
WIDTH, QUERIES = 8, 256
LARGE, REFERENCE, ASKED = 1_000_000, 240_000, 512
SHOWN = (
    "relative_1024",
    "beta_fit",
    "tokens_needed_20pct",
    "tokens_needed_10pct",
    "effective_1024",
)
LAWS = {  # (score deviation of a typical query, tokens)
    "Gaussian, s = 1": (1.0, lambda n, rng: rng.standard_normal((n, WIDTH))),
    "Gaussian, s = 2": (2.0, lambda n, rng: rng.standard_normal((n, WIDTH))),
    "mixture, s = 2": (2.0, lambda n, rng: _mixture(n, rng)),
    "Laplace, s = 1": (1.0, lambda n, rng: rng.laplace(size=(n, WIDTH)) / np.sqrt(2)),
}


def _mixture(n, rng):
    """One token in ten is of a narrow cluster apart from the rest."""
    apart = np.zeros(WIDTH)
    apart[0] = 2.0
    few = rng.random(n) < 0.1
    return np.where(
        few[:, None],
        apart + 0.5 * rng.standard_normal((n, WIDTH)),
        0.8 * rng.standard_normal((n, WIDTH)),
    )


def measured(q, tokens, alike=1.0):
    """What a probe finds of a head whose keys and values are these tokens, in float32: its table
    ``endless``.
    """
    q, tokens = (torch.from_numpy(x).float() for x in (q, tokens))
    keys, rows, kept = len(tokens), np.arange(len(q)), spread(len(q), SPEC.kept_queries)
    which = (SPEC, LayerInfo(0, 1, 1, 1.0, None, ""), 0, keys, keys, {})
    head = HeadView(
        *(*which, q, tokens, tokens, torch.arange(keys), torch.from_numpy(kept)),
        center=tokens.double().mean(0),
        pieces=torch.arange(keys) * PIECES // keys,
    )
    statistic, draws = MoreText(), Draws().measure(head)
    statistic.alike = alike
    row = {"n_keys": keys, "effective_tokens": float(1 / (1 / draws["effective"]).mean())}
    asked = Queries(rows, 0 * rows, 0 * rows, rows * PIECES // len(q))
    end = HeadEnd(*which, None, None, None, None, asked, kept, {"draws": draws}, row)
    return statistic.finish(statistic.measure(head), end).tables["endless"]


def queries(law, number, rng):
    return rng.standard_normal((number, WIDTH)) * LAWS[law][0] / np.sqrt(WIDTH)


def truth(law, keys, rng):
    """The numbers of an endless text, each on its own scale."""
    n = drawn_ladder(SPEC, keys)
    if law.startswith("Gaussian"):  # the law of s is that of a chi variable
        s = stats.chi(WIDTH).ppf((np.arange(4000) + 0.5) / 4000) * LAWS[law][0] / np.sqrt(WIDTH)
        along, across = (
            np.asarray(f) for f in es.gaussian_error(n[None].astype(float), s[:, None])
        )
        mse, limit, sum_p2 = along + (WIDTH - 1) * across, s**2, across
    else:
        tokens = torch.from_numpy(LAWS[law][1](LARGE, rng))
        curve = es.exact_pool_curve(
            torch.from_numpy(queries(law, ASKED, rng)).float(),
            tokens.float(),
            tokens.float(),
            n,
            scale=1.0,
        )
        mse, limit, sum_p2 = (
            curve.queries.mse,
            np.square(curve.queries.limit).sum(axis=1),
            curve.queries.sum_p2,
        )
    return read_numbers(
        SPEC, keys, n, mse.mean(axis=0)[None], limit.mean()[None], sum_p2.mean(axis=0)[None]
    )[0]


def of_laws(repeats=500, keys=16384):
    """Rows: law, number, share of intervals that cover, share beyond the text, share that covers
    among the others.
    """
    names = [number.key for number in headline_numbers(SPEC)]
    plain = {number.key: number.plain for number in headline_numbers(SPEC)}
    for law in LAWS:
        rng = np.random.default_rng(1)
        known = dict(zip(names, truth(law, keys, rng), strict=True))
        found = [
            measured(queries(law, QUERIES, rng), LAWS[law][1](keys, rng)).set_index("number")
            for _ in range(repeats)
        ]
        for name in SHOWN:
            rows = [(one.loc[name], plain[name](known[name])) for one in found]
            yield (
                law,
                name,
                *_shares(
                    [_covers(row, true) for row, true in rows], [row["status"] for row, _ in rows]
                ),
            )


def _covers(row, true):
    return not row["low"] > true and not row["high"] < true  # an end that is not known is no end


def _shares(covered, status):
    covered, beyond = np.array(covered, dtype=float), np.array(status) == BEYOND
    return covered.mean(), beyond.mean(), covered[~beyond].mean() if not beyond.all() else np.nan


def of_text(model, text, pools):
    """Rows: pool, number, shares of heads as in ``of_laws``, median ratio of the interval's
    ends.
    """
    source = {"packaged": text} if text in ("prose", "code", "legal") else {"texts": [Path(text)]}
    settings = {"model": model, "pool": "corpus", **source}
    folder = Path("runs") / "endless"
    name = f"{Path(model).stem}-{Path(text).stem}"
    large = es.probe(
        **settings,
        max_tokens=REFERENCE,
        queries=ASKED,
        kept_queries=1,
        out=folder / f"{name}-{REFERENCE}",
    )
    reference = large.table("endless").set_index(["layer", "head", "number"])["value"]
    for pool in pools:
        small = es.probe(**settings, max_tokens=pool, out=folder / f"{name}-{pool}").table(
            "endless"
        )
        for number in SHOWN:
            rows = small[small["number"] == number].to_dict("records")
            covered = [_covers(row, reference[row["layer"], row["head"], number]) for row in rows]
            both = [row for row in rows if row["status"] != BEYOND]
            change = (
                (lambda row: row["high"] - row["low"])
                if number == "beta_fit"
                else (lambda row: row["high"] / row["low"])
            )
            width = np.median([change(row) for row in both]) if both else np.nan
            yield (
                f"{pool} tokens",
                number,
                *_shares(covered, [row["status"] for row in rows]),
                width,
            )


def main(arguments):
    if arguments[:1] == ["text"] and len(arguments) > 2:
        print(
            "pool | number | covers | beyond the text | covers, two ends | width (ratio of the"
            " ends; exponent: difference)"
        )
        rows = of_text(
            arguments[1], arguments[2], [int(pool) for pool in arguments[3:]] or [4096, 16384]
        )
    elif arguments[:1] == ["laws"]:
        print("law | number | covers | beyond the text | covers, two ends")
        rows = of_laws(*(int(argument) for argument in arguments[1:3]))
    else:
        sys.exit(__doc__)
    for row in rows:
        print(
            " | ".join(word if isinstance(word, str) else f"{word:.3f}" for word in row), flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
