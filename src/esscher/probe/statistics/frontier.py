"""The exact error of every keep rule against the keys it keeps, in the queries' own contexts.

Rules that choose one set for all queries choose by other queries than those that are judged
(:class:`esscher.probe.session.RuleQueries`). Whether a head streams, retrieves or is diffuse
follows from three of them: sinks:4+recent, random, and the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from esscher.errors.curve import CURVE
from esscher.probe.budget import per_query
from esscher.probe.curves import at_error, percent
from esscher.probe.spec import FLOOR, SHARES, ProbeSpec
from esscher.probe.statistic import (
    ACCURACY,
    HEAD,
    KV_HEAD,
    LAYER,
    HeadEnd,
    HeadView,
    Numbers,
    Result,
    Statistic,
)
from esscher.runs.columns import Column

KINDS = {
    "streams": "sinks and recent keys suffice",
    "retrieves": "needs chosen keys",
    "diffuse": "choosing keys saves little",
}
STREAM, CHANCE = "sinks:4+recent", "random"  # they and the best rule tell a head's kind
STREAMS, DIFFUSE = 0.25, 4.0
ERROR = 0.1  # relative, at which kinds are told
NONE = "none"  # in place of a rule, where none reaches an error


class Frontier(Statistic):
    """Errors of the judged queries of some windows (esscher.probe.rules), and the gradient of log p
    at the head's output there: its weight in a split of keys between heads.
    """

    name = "frontier"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        if not spec.compared:
            return ()
        reached = (column for epsilon in spec.epsilons for column in _reached(epsilon))
        return (*KIND, RULE_KEYS, *reached, GRADIENT)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"frontier": FRONTIER} if spec.compared else {}

    def measure(self, head: HeadView) -> Numbers:
        found = dict(head.rule_errors or {})
        if head.gradient is not None:
            found["gradient"] = torch.tensor([head.gradient], dtype=torch.float64)
        return found

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        spec = end.spec
        if not spec.compared:
            return Result({}, {})
        felt = found.get("gradient")
        gradient = math.nan if felt is None else float(felt.square().mean().sqrt())
        if "mse" not in found:  # no window has enough keys
            words = {c.key: "" if c.kind == "word" else math.nan for c in self.columns(spec)}
            return Result(words | {"gradient": gradient}, {})
        keys = float(found["keys"].double().mean())
        rows = _rows(found, spec.compared).assign(
            kv_head=end.kv_head, keys=keys, queries=len(found["keys"])
        )
        curves = {str(rule): own for rule, own in rows.groupby("rule", sort=False)}
        columns = _kind(curves, keys) | {RULE_KEYS.key: keys, "gradient": gradient}
        for epsilon in spec.epsilons:
            needed = {rule: _needed(own, epsilon) for rule, own in curves.items()}
            columns |= {at_error(name, epsilon): value for name, value in _fewest(needed).items()}
        return Result(columns, {"frontier": rows})


def _rows(found: Numbers, rules: tuple[str, ...]) -> pd.DataFrame:
    """A row for each rule and share that every query's window has keys enough for; the same sizes
    once.
    """
    mse, kept, oracle = (found[name].numpy() for name in ("mse", "kept", "oracle"))
    again = np.zeros(mse.shape[1:], dtype=bool)
    again[:, 1:] = ((mse[..., 1:] == mse[..., :-1]) & (kept[..., 1:] == kept[..., :-1])).all(0)
    rms = np.sqrt(mse.mean(0))
    rule, share = np.nonzero(np.isfinite(rms) & ~again)
    limit = np.sqrt(found["limit"].double().mean().numpy())
    with np.errstate(divide="ignore", invalid="ignore"):
        relative, chosen = (
            np.where(size == 0, 0.0, size / limit) for size in (rms, np.sqrt(oracle.mean(0)))
        )
    return pd.DataFrame(
        {
            "rule": np.array(rules, dtype=object)[rule],
            "share": np.array(SHARES)[share],
            "kept": kept.mean(0)[rule, share],
            "rms": rms[rule, share],
            "relative": relative[rule, share],
            "q95": np.sqrt(np.quantile(mse, 0.95, axis=0))[rule, share],
            "oracle": chosen[rule, share],
            "queries_choosing": found["choosing"].numpy().min(0)[rule],
            "accuracy": found["accuracy"].numpy().max(0)[rule],
        }
    )


def _needed(rows: pd.DataFrame, epsilon: float, keys: float = math.inf) -> float:
    """Fewest keys with a relative error of at most epsilon, log error linear in log keys; infinite
    where none is enough.

    Where the error is 0 there is no logarithm: then it is the first size on the ladder. ``keys``:
    all there are. With them no error is left, and beyond the ladder it falls as that of random keys
    does at last, as sqrt(1/n - 1/keys).
    """
    kept, error = rows["kept"].to_numpy(), rows["relative"].to_numpy()
    below = np.flatnonzero(error <= epsilon)
    if below.size == 0 and math.isinf(keys):
        return math.inf
    if below.size == 0:
        rest = (epsilon / error[-1]) ** 2 * max(1 / kept[-1] - 1 / keys, 0.0)
        return float(1 / (1 / keys + rest))
    i = int(below[0])
    if i == 0 or error[i] == 0 or not math.isfinite(error[i - 1]):
        return float(kept[i])
    share = math.log(error[i - 1] / epsilon) / math.log(error[i - 1] / error[i])
    return float(kept[i - 1] * (kept[i] / kept[i - 1]) ** share)


def _fewest(needed: Mapping[str, float]) -> dict[str, Any]:
    """The rule that needs the fewest keys, the floor left out; the same of rules for a cache; and
    the floor.
    """
    rules = {rule: keys for rule, keys in needed.items() if rule != FLOOR and math.isfinite(keys)}
    cached = {rule: keys for rule, keys in rules.items() if not per_query(rule)}
    best, cache = (min(each, key=each.__getitem__, default=NONE) for each in (rules, cached))
    floor = needed.get(FLOOR, math.nan)
    return {
        "best_rule": best,
        "best_kept": rules.get(best, math.nan),
        "cache_rule": cache,
        "cache_kept": cached.get(cache, math.nan),
        "floor_kept": floor if math.isfinite(floor) else math.nan,
    }


def _kind(curves: Mapping[str, pd.DataFrame], keys: float) -> dict[str, Any]:
    """Which keys a head needs for a relative error of ERROR, in these contexts.

    streams: sinks:4+recent need at most STREAMS of the keys, and no more than random keys; diffuse:
    random keys are at most DIFFUSE times as many as those of the best rule, floor included:
    choosing saves little; retrieves: neither. Nothing is said where one of the two rules, or the
    floor, was not measured.
    """
    if not {STREAM, CHANCE, FLOOR} <= curves.keys():
        return {"kind": "", "kind_reason": ""}
    shares = {rule: _needed(own, ERROR, keys) / keys for rule, own in curves.items()}
    stream, chance, best = shares[STREAM], shares[CHANCE], min(shares, key=shares.__getitem__)
    kind = "retrieves"
    if stream <= min(STREAMS, chance):
        kind = "streams"
    elif chance <= DIFFUSE * shares[best]:
        kind = "diffuse"
    told = dict.fromkeys((STREAM, CHANCE, best))
    needs = ", ".join(f"{rule} {shares[rule]:.1%}" for rule in told)
    reason = f"{KINDS[kind]}; of the keys, for an error of {percent(ERROR)} %: {needs}"
    return {"kind": kind, "kind_reason": reason}


# ---- columns

KIND = (
    Column(
        "kind",
        "word",
        "kind of head",
        f"For a relative error of {percent(ERROR)} %, on this text and window: streams if {STREAM}"
        f" need at most {STREAMS:.0%} of the keys and no more than random ones; diffuse if random"
        f" keys are at most {DIFFUSE:g} times those of the best rule; else retrieves.",
        scale="words",
        first=16,
        short="kind",
        words=tuple(KINDS),
        meanings=tuple(KINDS.values()),
    ),
    Column("kind_reason", "word", "why this kind", "What the rules that tell the kind need."),
)
RULE_KEYS = Column(
    "rule_keys",
    "float",
    "keys under keep rules",
    "Keys of the cache that the judged queries see, on average: what kept keys are out of.",
    scale="log",
)
GRADIENT = Column(
    "gradient",
    "float",
    "gradient of log p",
    "Root mean square gradient of the log probability of next tokens, drawn from the model, at the"
    " head's output: what its errors count in the best split.",
    scale="log",
)


def _reached(epsilon: float) -> tuple[Column, ...]:
    error = f"{percent(epsilon)} %"

    def column(name: str, kind: Any, label: str, what: str, **more: Any) -> Column:
        return Column(at_error(name, epsilon), kind, f"{label}, {error}", what, **more)

    fewest = f"Keep rule that reaches a relative error of {error} with the fewest keys; none: none."
    cache = f"The same among rules that drop keys for good ({error})."
    kept = f"Keys that the best rule for a cache keeps at {error}."
    floor = f"Keys that chances of least error (Neyman) keep on average for {error}."
    short = {"scale": "log", "short": f"best {error}"}
    first = {"scale": "log", "first": 17, "short": f"cache {error}"}
    return (
        column("best_rule", "word", "best rule", fewest),
        column(
            "best_kept", "float", "keys of the best rule", f"Keys it keeps for {error}.", **short
        ),
        column("cache_rule", "word", "best rule for a cache", cache, short=f"cache rule {error}"),
        column("cache_kept", "float", "keys of the cache", kept, **first),
        column(
            "floor_kept", "float", "keys of the floor", floor, scale="log", short=f"floor {error}"
        ),
    )


FRONTIER = (
    LAYER,
    HEAD,
    KV_HEAD,
    Column("rule", "word", "keep rule", "Which keys are kept, as esscher.keep writes it."),
    Column("share", "float", "share", "Share of the cache's keys that the rule was given.", "log"),
    Column("kept", "float", "keys kept", "Keys of the cache that are kept, on average.", "log"),
    Column(
        "keys",
        "float",
        "keys in the cache",
        "Keys of the cache that a query sees, on average; of a causal model those before the judged"
        " queries, as later ones are all kept.",
    ),
    *(column for column in CURVE if column.key in ("rms", "relative", "q95")),
    Column(
        "oracle",
        "float",
        "relative error, oracle",
        "Relative error if the judged queries themselves had chosen the keys: no cache can.",
        "log",
    ),
    Column(
        "queries_choosing",
        "int",
        "queries that chose",
        "Positions of a window whose queries chose the keys for all; 0 where the rule looks at no"
        " queries, or at each judged one itself.",
    ),
    Column(
        "queries", "int", "queries judged", "Number of queries that the error is the mean over."
    ),
    ACCURACY,
)
