"""Keys that a keep rule needs: of each key-value cache at an error, and the best split of a total
between caches.

Read from the table ``frontier`` of a probe: relative errors of every head at a ladder of sizes. All
keys kept is no error, the last size of every ladder; between sizes log errors are interpolated. A
size counts for the largest error from it on, so that more keys never cost: a budget is the size
from which the error stays below.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

from esscher.errors.budget import Counts, Sharing, log_rms, tokens_needed
from esscher.errors.curve import ErrorCurve, Floats
from esscher.inputs import as_count, as_positive
from esscher.keep import parse
from esscher.keep.rule import Chance, Placed
from esscher.probe.curves import METRICS, WORST, stored_curves, worst_of
from esscher.probe.session import measured_part
from esscher.probe.spec import ALLOWED
from esscher.runs import Run, load_run
from esscher.runs.columns import Column

OWN, UNIFORM, BEST = ("each head its own", "uniform", "best split")
WANTED = Column(
    "epsilon", "float", "relative error allowed", "Relative error that is allowed.", short="asked"
)
# what a percentage of the cache is, wherever one is shown
SHARE = (
    "Keys kept over keys that the cache holds, summed over layers and key-value heads; a"
    " sliding-window layer holds at most its window."
)
RATIO = Column("ratio", "float", "share of the cache kept", SHARE, short="of the cache")
SAVED = Column("saved", "float", "saved", "Share of the cache that is dropped: 1 - share kept.")
BUDGET = (  # of budget_table
    WANTED,
    Column("rule", "word", "split", "How tokens are shared between heads."),
    Column("tokens", "int", "tokens", "Number of tokens kept."),
    RATIO,
    SAVED,
    Column(
        "squared_error", "float", "squared error", "Squared relative error, mean over the heads."
    ),
    *WORST,
)


@dataclass(frozen=True, repr=False)
class Budget:
    """Tokens to keep, at random, for a relative error of ``epsilon``, or the best split of
    ``total``.

    ``heads``: a row per head (n_keys, tokens, ratio). ``caches``: a row per key-value head, whose
    heads share its keys: the most that one of them needs, and its share of the best split.
    ``totals``: a row per split, with tokens, ratio, saved (share of the cache that goes),
    squared_error (relative, mean over the heads: a head counts by its error relative to its own
    limit, whatever the size of that) and the head and the layer that it serves worst. Of a total
    the tokens are those of the best split. ``part``: of the model that was measured.
    """

    epsilon: float | None
    heads: pd.DataFrame
    caches: pd.DataFrame
    totals: pd.DataFrame
    part: str = ""

    def __repr__(self) -> str:
        return f"Budget({described(self.totals, 'rule', self.part)}; tables heads, caches, totals)"


def described(totals: pd.DataFrame, split: str, part: str) -> str:
    """Each split in a few words: what it keeps, and what it serves worst. ``split``: the column
    that names them.
    """
    told = [
        f"{row[split]} keeps {row['ratio']:.1%}, worst head {row['worst_head']} {row['worst']:.1%},"
        f" worst layer {row['worst_layer']} {row['worst_layer_error']:.1%}"
        for row in totals.to_dict("records")
    ]
    return "; ".join([*([part] if part else []), *told])


def error_or_total(epsilon: Any, total: Any) -> tuple[float | None, int | None]:
    """What a budget is asked for: one of the two, checked."""
    if (epsilon is None) == (total is None):
        raise ValueError(
            f"budget: expected an error or a total, got epsilon {epsilon} and total {total}"
        )
    if epsilon is None:
        return None, as_count(total, "total")
    epsilon = as_positive(epsilon, "epsilon")
    if epsilon >= 1:
        raise ValueError(f"epsilon: expected a relative error between 0 and 1, got {epsilon:g}")
    return epsilon, None


def budget_of(
    heads: pd.DataFrame, curves: pd.DataFrame, epsilon: Any = None, total: Any = None
) -> Budget:
    """The budget at one error, or of a total number of tokens, from the tables of a probe; keys are
    kept at random.
    """
    epsilon, total = error_or_total(epsilon, total)
    # a head whose values are all alike has no error at any n: it needs no token, and there is
    # nothing to compare
    known = {
        place: curve
        for place, curve in stored_curves(curves, METRICS["bernoulli"]).items()
        if curve.rms[0] > 0
    }
    if not known:
        raise ValueError(
            "curves: no errors of kept keys in this run; were all of its heads refused?"
        )
    kv_of = {(int(row.layer), int(row.head)): int(row.kv_head) for row in heads.itertuples()}
    per_head = pd.DataFrame(
        [
            {
                "layer": layer,
                "head": head,
                "kv_head": kv_of[layer, head],
                "n_keys": int(curve.n[-1]),
            }
            for (layer, head), curve in known.items()
        ]
    )
    groups = per_head.groupby(["layer", "kv_head"], sort=True)
    pools = [
        _together([known[int(layer), int(head)] for head in rows["head"]])
        for (layer, _), rows in groups
    ]
    caches = groups.agg(heads=("head", "size"), n_keys=("n_keys", "max")).reset_index()
    sharing, size = Sharing(pools), float(len(per_head))
    if epsilon is None:
        splits = shared(sharing, total=total)
        caches["tokens"] = splits[BEST]
        per_head["tokens"] = splits[BEST][groups.ngroup()]
    else:
        per_head["tokens"] = [tokens_needed(curve, epsilon) for curve in known.values()]
        caches["tokens"] = per_head["tokens"].groupby(groups.ngroup()).max()
        splits = {OWN: caches["tokens"].to_numpy(), **shared(sharing, size * epsilon**2)}
    for table in (per_head, caches):
        table["ratio"] = table["tokens"] / table["n_keys"]
    caches["best_split"] = splits[BEST]
    totals = _totals(sharing, size, epsilon, splits)
    worst = [
        _worst(known, dict(zip(known, tokens[groups.ngroup()].tolist(), strict=True)))
        for tokens in splits.values()
    ]
    return Budget(epsilon, per_head, caches, totals.join(pd.DataFrame(worst)))


def _worst(
    curves: Mapping[tuple[int, int], ErrorCurve], tokens: Mapping[tuple[int, int], int]
) -> dict[str, Any]:
    """The head and the layer that have the largest error, each head with the tokens of its
    cache.
    """
    heights = {
        place: float(log_rms(curve)(math.log(tokens[place]))) for place, curve in curves.items()
    }
    return worst_of(
        {place: (math.exp(2 * heights[place]), curve.scale**2) for place, curve in curves.items()}
    )


def budget_table(
    heads: pd.DataFrame, curves: pd.DataFrame, epsilons: Sequence[float]
) -> pd.DataFrame:
    """budget.parquet: the totals at several errors."""
    return pd.concat(
        [budget_of(heads, curves, epsilon).totals for epsilon in epsilons], ignore_index=True
    )


def _together(curves: list[ErrorCurve]) -> ErrorCurve:
    """The summed squared relative error of heads that share their keys."""
    rms = np.sqrt(sum(curve.relative**2 for curve in curves))
    scale = math.sqrt(len(curves))
    return ErrorCurve(
        n=curves[0].n, rms=np.asarray(rms), kind="exact", metric=METRICS["bernoulli"], scale=scale
    )


def shared(sharing: Sharing, target: float = math.nan, total: Any = None) -> dict[str, Counts]:
    """The same share for all and the best split: of a total, or of the fewest tokens with a summed
    squared error of ``target``.
    """
    even = sharing.split(sharing.fewest(target, uniform=True) if total is None else total)
    best = sharing.split(sharing.fewest(target)) if total is None else even
    return {UNIFORM: even.uniform, BEST: best.tokens}


def _totals(
    sharing: Sharing, size: float, epsilon: float | None, splits: dict[str, Counts]
) -> pd.DataFrame:
    most = int(sharing.most.sum())
    rows = [
        {
            "epsilon": math.nan if epsilon is None else epsilon,
            "rule": split,
            "tokens": int(tokens.sum()),
            "ratio": int(tokens.sum()) / most,
            "saved": 1 - int(tokens.sum()) / most,
            "squared_error": sharing.squared_error(tokens) / size,
        }
        for split, tokens in splits.items()
    ]
    return pd.DataFrame(rows)


# ---- Keys that a keep rule needs: of each key-value cache at an error, and the best split of a
# total between caches.

Weights = Mapping[tuple[int, int], float]  # by layer and head

# sizes are counted in thousandths of a key: contexts differ, and a mean number of keys is no whole
# one
UNIT = 1000
FEWEST = 1e-9  # relative errors below are rounding; a curve is 0 at its last size only

RULE_BUDGET = (  # of rule_table
    WANTED,
    Column("rule", "word", "keep rule", "Rule that says which keys are kept."),
    Column(
        "split",
        "word",
        "split",
        "How the keys that are kept are shared between heads; the best split is found on the errors"
        " that it is told with.",
    ),
    Column(
        "chosen",
        "word",
        "chosen",
        "Whether keys are chosen once, before the queries that are judged, as a cache must, or for"
        " each query: then a query reads so few, and the cache holds all.",
        words=("once", "for each query"),
    ),
    Column(
        "keys",
        "float",
        "keys in all",
        "Keys kept in all caches of one context of mean length.",
        short="keys",
    ),
    RATIO,
    SAVED,
    Column(
        "error",
        "float",
        "error",
        "Relative error: root of the mean square over heads, each counted by what next tokens feel"
        " of it where that is known.",
    ),
    Column(
        "q95",
        "float",
        "error, 95 %",
        "Error that 95 % of the queries stay below, in the head where it is largest.",
    ),
    *WORST,
)


@dataclass(frozen=True)
class Cache:
    """A key-value head under a rule, at a ladder of sizes that ends with all keys; a row for each
    query head that reads it.
    """

    layer: int
    kv_head: int
    heads: tuple[int, ...]
    keys: float  # that a query sees, on average
    sizes: Counts  # kept, in thousandths of a key
    rms: Floats  # (heads, sizes), relative
    q95: Floats
    # (heads,): what each head's relative error counts in a split, of root mean square 1 over all
    # caches
    counts: Floats

    @cached_property
    def together(self) -> ErrorCurve:
        """Squared relative errors summed over the heads."""
        return _curve(self.sizes, np.sqrt(np.square(self.rms).sum(0)), math.sqrt(len(self.heads)))

    @cached_property
    def counted(self) -> ErrorCurve:
        """The same with each head's error counted as a split does."""
        errors = np.sqrt(np.square(self.counts[:, None] * self.rms).sum(0))
        return _curve(self.sizes, errors, math.sqrt(float(np.square(self.counts).sum())))

    @cached_property
    def quantile(self) -> ErrorCurve:
        """The 95 % quantile over queries, of the head where it is largest."""
        return _curve(self.sizes, self.q95.max(0))

    def each(self) -> Iterator[Cache]:
        """Its query heads, as if each had the cache for itself."""
        for i, head in enumerate(self.heads):
            yield replace(
                self, heads=(head,), rms=self.rms[[i]], q95=self.q95[[i]], counts=self.counts[[i]]
            )

    def at(self, size: int) -> tuple[Floats, float]:
        """Errors of the heads at a size, and the quantile."""
        own, quantile = self._between
        return np.exp([float(height(math.log(size))) for height in own]), math.exp(
            float(quantile(math.log(size)))
        )

    @cached_property
    def _between(self) -> tuple[list[Callable[[Any], Floats]], Callable[[Any], Floats]]:
        return [log_rms(_curve(self.sizes, row)) for row in self.rms], log_rms(self.quantile)


@dataclass(frozen=True, repr=False)
class RuleBudget:
    """What a rule needs. ``caches``: a row per key-value head; ``heads``: per query head;
    ``totals``: per split, summed.

    ``keys``, ``ratio``: kept for a root mean square error of ``epsilon`` over the queries of the
    heads that read the cache, or the best split of ``total``; ``error``, ``q95``: then;
    ``keys_q95``: for which 95 % of the queries stay below epsilon. ``part``: of the model that was
    measured.
    """

    rule: str
    epsilon: float | None
    total: int | None
    caches: pd.DataFrame
    heads: pd.DataFrame
    totals: pd.DataFrame
    part: str = ""

    def __repr__(self) -> str:
        return (
            f"RuleBudget({self.rule}, {described(self.totals, 'split', self.part)}; tables heads,"
            " caches, totals)"
        )


def find_rule(frontier: pd.DataFrame, text: str) -> str:
    """The rule as the frontier names it; ValueError for what is no rule, and for one that was not
    measured.
    """
    wanted = str(parse(text))
    known = list(dict.fromkeys(frontier["rule"]))
    found = next((name for name in known if str(parse(name)) == wanted), None)
    if found is None:
        raise ValueError(
            f"rule: this run has no errors of {wanted}; it has those of {', '.join(known)}"
        )
    return str(found)


def per_query(rule: str) -> bool:
    """Whether every query has keys of its own: then a rule says what is read, not what a cache may
    drop.
    """
    return any(part.per_query for part in parse(rule).parts)


def random_frontier(heads: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """The frontier of random keys from the curves of kept keys, for runs that measured no other
    rule.
    """
    kv_of = {(int(row.layer), int(row.head)): int(row.kv_head) for row in heads.itertuples()}
    frames = [
        pd.DataFrame(
            {
                **{"layer": layer, "head": head, "kv_head": kv_of[layer, head], "rule": "random"},
                **{
                    "share": curve.n / curve.n[-1],
                    "kept": curve.n.astype(float),
                    "keys": float(curve.n[-1]),
                },
                **{"rms": curve.rms, "relative": curve.relative, "q95": curve.q95},
            }
        )
        for (layer, head), curve in stored_curves(curves, METRICS["bernoulli"]).items()
        if curve.rms[0] > 0
    ]
    if not frames:
        raise ValueError(
            "curves: no errors of kept keys in this run; were all of its heads refused?"
        )
    return pd.concat(frames, ignore_index=True)


def rule_budget(
    frontier: pd.DataFrame,
    rule: str,
    epsilon: Any = None,
    total: Any = None,
    weights: Weights | None = None,
) -> RuleBudget:
    """The budget of a rule of the frontier at an error, or the best split of a total number of
    keys.

    ``weights``: how much next tokens feel an error of each head's output (:func:`gradients_of`,
    :func:`head_weights`).
    """
    epsilon, total = error_or_total(epsilon, total)
    errors = _Errors(frontier, rule, weights)
    splits = errors.splits(epsilon, total)
    sizes = splits[BEST if epsilon is None else OWN]
    caches = pd.DataFrame(errors.cache_rows(sizes, epsilon))
    caches["best_split"] = splits[BEST] / UNIT
    heads = pd.DataFrame(errors.head_rows(sizes, epsilon))
    return RuleBudget(rule, epsilon, total, caches, heads, errors.totals(epsilon, splits))


def rule_table(
    frontier: pd.DataFrame, asked: Sequence[tuple[Any, Any]], weights: Weights | None = None
) -> pd.DataFrame:
    """The totals of every rule, for errors or totals (the other None); rule_budget.parquet has them
    for some errors.
    """
    wanted = [error_or_total(epsilon, total) for epsilon, total in asked]
    frames = []
    for rule in dict.fromkeys(frontier["rule"]):
        errors = _Errors(frontier, rule, weights)
        for epsilon, total in wanted:
            frames.append(errors.totals(epsilon, errors.splits(epsilon, total)))
    return pd.concat(frames, ignore_index=True)


class _Errors:
    """The caches of a rule, prepared for many sizes and totals."""

    def __init__(self, frontier: pd.DataFrame, rule: str, weights: Weights | None) -> None:
        self.rule, self.caches = rule, caches_of(frontier, rule, weights)
        self.sharing = Sharing([cache.counted for cache in self.caches])

    def splits(self, epsilon: float | None, total: int | None = None) -> dict[str, Counts]:
        """At an error: each cache what its own heads need on average, the same share for all, and
        the best split, these two with that error over all heads. Of a total: these two.
        """
        if epsilon is not None:
            own = np.array([tokens_needed(cache.together, epsilon) for cache in self.caches])
            return {
                OWN: own,
                **shared(
                    self.sharing, epsilon**2 * sum(cache.counted.scale**2 for cache in self.caches)
                ),
            }
        assert total is not None
        low, high = (
            math.ceil(self.sharing.least.sum() / UNIT),
            math.floor(self.sharing.most.sum() / UNIT),
        )
        if not low <= total <= high:
            raise ValueError(
                f"total: expected {low} (the smallest sizes of {self.rule} measured) to {high} keys"
                f" (all), got {total}"
            )
        return shared(self.sharing, total=total * UNIT)

    def cache_rows(self, sizes: Counts, epsilon: float | None) -> Iterator[dict[str, Any]]:
        for cache, size in zip(self.caches, sizes.tolist(), strict=True):
            rms, q95 = cache.at(size)
            row = {
                "layer": cache.layer,
                "kv_head": cache.kv_head,
                "heads": len(cache.heads),
                **_kept(cache, size),
            }
            row |= {"error": math.sqrt(float(np.square(rms).mean())), "q95": q95}
            yield (
                row
                if epsilon is None
                else {**row, "keys_q95": tokens_needed(cache.quantile, epsilon) / UNIT}
            )

    def head_rows(self, sizes: Counts, epsilon: float | None) -> Iterator[dict[str, Any]]:
        """Query heads: with the keys of their cache, or at an error with those that each by itself
        would need.
        """
        for cache, size in zip(self.caches, sizes.tolist(), strict=True):
            for alone in cache.each():
                own = size if epsilon is None else tokens_needed(alone.together, epsilon)
                row = {
                    "layer": cache.layer,
                    "head": alone.heads[0],
                    "kv_head": cache.kv_head,
                    **_kept(cache, own),
                }
                (error,), q95 = alone.at(own)
                row |= {"error": float(error), "q95": q95}
                yield (
                    row
                    if epsilon is None
                    else {**row, "keys_q95": tokens_needed(alone.quantile, epsilon) / UNIT}
                )

    def totals(self, epsilon: float | None, splits: dict[str, Counts]) -> pd.DataFrame:
        return pd.DataFrame([self._total(epsilon, split, sizes) for split, sizes in splits.items()])

    def _total(self, epsilon: float | None, split: str, sizes: Counts) -> dict[str, Any]:
        found = [
            (cache, *cache.at(size))
            for cache, size in zip(self.caches, sizes.tolist(), strict=True)
        ]
        squared = {
            (cache.layer, head): (float(error) ** 2, 1.0)
            for cache, rms, _ in found
            for head, error in zip(cache.heads, rms, strict=True)
        }
        counted = sum(float(np.square(cache.counts * rms).sum()) for cache, rms, _ in found)
        keys, most = float(sizes.sum()) / UNIT, float(self.sharing.most.sum()) / UNIT
        return {
            "epsilon": math.nan if epsilon is None else epsilon,
            "rule": self.rule,
            "split": split,
            "chosen": "for each query" if per_query(self.rule) else "once",
            "keys": keys,
            "ratio": keys / most,
            "saved": 1 - keys / most,
            "error": math.sqrt(counted / len(squared)),
            "q95": max(q95 for _, _, q95 in found),
            **worst_of(squared),
        }


def gradients_of(heads: pd.DataFrame) -> dict[tuple[int, int], float] | None:
    """Root mean square gradient of log p of next tokens at each head's output, from a probe's own
    table ``heads``.

    The plain error times this gradient is, of what one may know of a head without compressing it,
    what predicts best how its compression changes next tokens (docs/model.md). None where a head
    that was measured has none: the model is no language model, or has no cache to continue from.
    """
    known = heads[heads["status"] == "ok"]
    if (
        "gradient" not in known
        or not np.isfinite(known["gradient"]).all()
        or not (known["gradient"] > 0).any()
    ):
        return None
    return {(int(row.layer), int(row.head)): float(row.gradient) for row in known.itertuples()}


def head_weights(sensitivity: pd.DataFrame) -> dict[tuple[int, int], float]:
    """The same from a downstream run's table ``sensitivity``, of its texts."""
    known = sensitivity[sensitivity["plain"] > 0]
    texts = (
        known.assign(gradient=known["sensitive"] / known["plain"])
        .groupby(["layer", "head"])["gradient"]
        .mean()
    )
    return {(int(layer), int(head)): float(value) for (layer, head), value in texts.items()}


def caches_of(frontier: pd.DataFrame, rule: str, weights: Weights | None = None) -> list[Cache]:
    """The key-value heads that have errors of any rule; one that this rule has no size for needs
    all of its keys.

    With weights a head's relative error counts as much as the weight times the size of its output,
    of root mean square 1.
    """
    known = frontier[np.isfinite(frontier["relative"])]
    with np.errstate(invalid="ignore"):  # no error, no quantile
        q95 = np.where(known["rms"] > 0, known["q95"] * known["relative"] / known["rms"], 0.0)
    groups = known.assign(q95=q95).groupby(["layer", "kv_head"], sort=True)
    if not len(known):
        raise ValueError(
            "frontier: no errors of kept keys in this run; were all of its heads refused?"
        )
    caches = [_cache(int(layer), int(kv_head), rows, rule) for (layer, kv_head), rows in groups]
    if weights is None:
        return caches
    sizes = (
        (known["rms"] / known["relative"])
        .where(known["relative"] > 0)
        .groupby([known["layer"], known["head"]])
        .median()
    )
    missing = [place for place in sizes.index if place not in weights]
    if missing:
        raise ValueError(
            f"weights: there is none of head {missing[0][0]}.{missing[0][1]}; measure all heads of"
            " the probe"
        )
    counts = {
        place: weights[place] * (float(size) if size > 0 else 0.0) for place, size in sizes.items()
    }
    scale = math.sqrt(float(np.square(list(counts.values())).mean())) or 1.0
    return [
        replace(cache, counts=np.array([counts[cache.layer, head] / scale for head in cache.heads]))
        for cache in caches
    ]


def _cache(layer: int, kv_head: int, rows: pd.DataFrame, rule: str) -> Cache:
    """Heads that read one cache, at the sizes that all of them have."""
    heads, keys = sorted(set(rows["head"])), float(rows["keys"].mean())
    own = rows[rows["rule"] == rule]
    shares = np.unique(own["share"])
    values = np.full((3, len(heads), len(shares)), np.nan)
    values[:, np.searchsorted(heads, own["head"]), np.searchsorted(shares, own["share"])] = own[
        ["kept", "relative", "q95"]
    ].T
    kept, relative, q95 = values[..., np.isfinite(values).all((0, 1))]
    sizes, first = np.unique(np.round(kept.mean(0) * UNIT).astype(np.int64), return_index=True)
    below = (sizes > 0) & (sizes < round(keys * UNIT))
    errors, largest = (_falling(values[:, first[below]]) for values in (relative, q95))
    sizes, alike = np.append(sizes[below], round(keys * UNIT)), np.ones(len(heads))
    return Cache(layer, kv_head, tuple(map(int, heads)), keys, sizes, errors, largest, alike)


def _falling(errors: Floats) -> Floats:
    """The largest error from each size on, (heads, sizes), and 0 where all keys are kept."""
    largest = np.maximum.accumulate(np.maximum(errors, FEWEST)[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate([largest, np.zeros((len(errors), 1))], axis=1)


def _curve(sizes: Counts, rms: Floats, scale: float = 1.0) -> ErrorCurve:
    return ErrorCurve(n=sizes, rms=rms, kind="exact", scale=scale)


def _kept(cache: Cache, size: int) -> dict[str, float]:
    return {"n_keys": cache.keys, "keys": size / UNIT, "ratio": size / float(cache.sizes[-1])}


# ---- A budget as others read it: a record of every key-value head (JSON, YAML), and the array of
# kvpress's per-head press.

KINDS = ("json", "yaml", "kvpress")


def budget_record(found: RuleBudget, about: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of every cache, with the error it leaves, and what that holds for."""
    split = "best split" if found.epsilon is None else "each head its own"
    (total,) = found.totals[found.totals["split"] == split].to_dict("records")
    kept = ("layer", "kv_head", "n_keys", "keys", "ratio", "error", "q95")
    return {
        **about,
        "rule": found.rule,
        "chosen": total["chosen"],
        "epsilon": found.epsilon,
        "total": found.total,
        "split": split,
        **{
            name: _plain(total[name])
            for name in ("keys", "ratio", "error", "q95", *(column.key for column in WORST))
        },
        "caches": [
            {name: _plain(row[name]) for name in kept} for row in found.caches.to_dict("records")
        ],
    }


def _plain(value: Any) -> Any:
    """Neither JSON nor kvpress knows NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_bytes(content: dict[str, Any] | npt.NDArray[np.float32], kind: str, ending: str) -> bytes:
    """The content of a file: an array is .npy where its name ends so, else nested lists."""
    if isinstance(content, np.ndarray) and ending == ".npy":
        file = io.BytesIO()
        np.save(file, content, allow_pickle=False)
        return file.getvalue()
    if isinstance(content, np.ndarray):
        return (json.dumps(content.astype(float).round(6).tolist()) + "\n").encode()
    text = (
        yaml.safe_dump(content, sort_keys=False)
        if kind == "yaml"
        else json.dumps(content, indent=2, allow_nan=False) + "\n"
    )
    return text.encode()


def prune_ratios(
    frontier: pd.DataFrame, rule: str, layers: int, kv_heads: int, weights: Weights | None = None
) -> npt.NDArray[np.float32]:
    """Shares to drop of each cache, (99, layers, kv_heads): row i is the best split that drops (i +
    1) % of the keys that all caches hold.

    Steepest first (:class:`esscher.errors.budget.Sharing`), so that no cache gets fewer keys
    where more are kept in all. Below the smallest size that was measured every cache shrinks in
    proportion.
    """
    if (reason := _not_a_press(rule)) is not None:
        raise ValueError(f"kvpress: {rule} {reason}; give another rule")
    caches = {(cache.layer, cache.kv_head): cache for cache in caches_of(frontier, rule, weights)}
    wanted = [(layer, kv) for layer in range(layers) for kv in range(kv_heads)]
    missing = [f"{layer}.{kv}" for layer, kv in wanted if (layer, kv) not in caches]
    if missing:
        measured = ", ".join(str(layer) for layer in sorted({layer for layer, _ in caches}))
        raise ValueError(
            f"kvpress: expected every key-value head of {layers} layers; this run has layers"
            f" {measured}, without {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
        )
    sharing = Sharing([caches[place].counted for place in wanted])
    least, most = int(sharing.least.sum()), int(sharing.most.sum())
    found = np.empty((99, len(wanted)))
    for percent in range(1, 100):
        total = round((100 - percent) / 100 * most)
        kept = (
            sharing.steepest_first(total)[0] if total >= least else sharing.least * (total / least)
        )
        found[percent - 1] = 1 - kept / sharing.most
    return found.reshape(99, layers, kv_heads).astype(np.float32)


def _not_a_press(rule: str) -> str | None:
    """Why no press of kvpress can follow a rule: it drops keys once, for all later queries, and the
    keys it keeps count as they are.
    """
    parts = parse(rule).parts
    if per_query(rule) or any(isinstance(part, Placed) and part.period > 1 for part in parts):
        return "chooses keys for each query, so that the cache holds all, and a press chooses once"
    if any(isinstance(part, Chance) and part.reweight for part in parts):
        return "gives kept keys weights of 1/p, and a press has no weights"
    return None


# ---- The budget of a stored probe, from the tables that it has.

ALIKE = "none"  # weights: every head counts alike


def run_budget(
    run: Run,
    epsilon: Any = None,
    total: Any = None,
    rule: str | None = None,
    weights: str | None = None,
) -> Budget | RuleBudget:
    """Keys for a relative error, or the best split of a total, under a rule; random keys of a probe
    of the corpus.

    ``weights``: what heads count in a split, as of :func:`split_weights`.
    """
    if run.manifest.job != "probe":
        raise ValueError(
            f"{run.path}: expected a run of esscher probe, got one of {run.manifest.job}"
        )
    epsilon = ALLOWED if epsilon is None and total is None else epsilon
    several, part = "frontier" in run.tables, measured_part(run)
    counts, _ = split_weights(run, weights)
    if rule is None and not several:
        return replace(
            budget_of(run.table("heads"), run.table("curves"), epsilon, total), part=part
        )
    frontier = (
        run.table("frontier")
        if several
        else random_frontier(run.table("heads"), run.table("curves"))
    )
    found = rule_budget(
        frontier, find_rule(frontier, "random" if rule is None else rule), epsilon, total, counts
    )
    return replace(found, part=part)


def split_weights(run: Run, asked: str | None) -> tuple[Weights | None, str]:
    """What the errors of a probe's heads count in a split, None where alike; and that in words.

    ``asked``: None for the gradients of log p that the probe itself measured, where its model has
    next tokens; ALIKE; or a run of esscher downstream with the table sensitivity.
    """
    if asked == ALIKE:
        return None, "heads count alike"
    if asked is None:
        own = gradients_of(run.table("heads"))
        return (
            own,
            "heads count alike (no gradients in this run)"
            if own is None
            else "heads count by the gradient of log p",
        )
    stored = load_run(Path(asked))
    if "sensitivity" not in stored.tables:
        raise ValueError(
            f"weights: {asked} has no table sensitivity; run esscher downstream with --sensitivity"
        )
    return head_weights(stored.table("sensitivity")), f"heads count by the gradients of {asked}"
