"""Keys that a keep rule needs: of each key-value cache at an error, and the best split of a total.

Everything is read from a frontier: the relative error of every head at a ladder of sizes, for each
keep rule. Random keys are one rule; a run that compared no rules has their frontier in its curves.
All keys kept is no error, the last size of every ladder; between sizes log errors are interpolated.
A size counts for the largest error from it on, so that more keys never cost.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
from esscher.keep import Strided, parse
from esscher.keep.rule import Chance
from esscher.probe.curves import METRICS, stored_curves
from esscher.probe.session import measured_part
from esscher.probe.spec import ALLOWED
from esscher.runs import Run, load_run
from esscher.runs.columns import Column

Weights = Mapping[tuple[int, int], float]  # by layer and head

OWN, UNIFORM, BEST = ("each head its own", "uniform", "best split")
RANDOM = "random"
ALIKE = "none"  # weights: every head counts alike
KINDS = ("json", "yaml", "kvpress")  # of an export
UNIT = 1000  # sizes are counted in thousandths of a key: a mean number of keys is not whole
FEWEST = 1e-9  # relative errors below are rounding; a curve is 0 at its last size only

SHARE = (
    "Keys kept over keys that the cache holds, summed over layers and key-value heads; a"
    " sliding-window layer holds at most its window."
)
BUDGET = (
    Column("epsilon", "float", "error allowed", "Relative error that is allowed.", short="asked"),
    Column("rule", "word", "keep rule", "Rule that says which keys are kept."),
    Column("split", "word", "split", "How the kept keys are shared between heads."),
    Column(
        "chosen",
        "word",
        "chosen",
        "Whether keys are chosen once, as a cache must, or for each query: then a query reads so"
        " few, and the cache holds all.",
        words=("once", "for each query"),
    ),
    Column("keys", "float", "keys", "Keys kept in all caches of one context of mean length."),
    Column("ratio", "float", "share of the cache kept", SHARE, short="of the cache"),
    Column("saved", "float", "saved", "Share of the cache that is dropped: 1 - share kept."),
    Column(
        "error",
        "float",
        "error",
        "Relative error: root mean square over heads, weighed by the gradient of log p at each"
        " head's output where that is known.",
    ),
    Column("q95", "float", "error, 95 %", "95 % quantile over queries, in the worst head."),
    Column("worst", "float", "largest error", "Relative error of the worst head.", short="worst"),
    Column("worst_head", "word", "worst head", "Layer and head of the largest error."),
    Column(
        "worst_layer_error",
        "float",
        "largest error of a layer",
        "Root mean square error of the heads of the worst layer, without weights.",
    ),
    Column("worst_layer", "word", "worst layer", "Layer of the largest error."),
)


@dataclass(frozen=True, repr=False)
class Budget:
    """Keys that a rule keeps. ``caches``: a row per key-value head; ``heads``: per query head, what
    it alone would need; ``totals``: per split, with the columns of BUDGET.

    ``keys``, ``ratio``: kept for a root mean square error of ``epsilon`` over the heads that read
    the cache, or in the best split of ``total``; ``error``, ``q95``: then. ``best_split``: keys in
    the best split. ``part``: of the model that was measured.
    """

    rule: str
    epsilon: float | None
    total: int | None
    caches: pd.DataFrame
    heads: pd.DataFrame
    totals: pd.DataFrame
    part: str = ""

    def __repr__(self) -> str:
        told = [
            f"{row['split']} keeps {row['ratio']:.1%}, worst head {row['worst_head']}"
            f" {row['worst']:.1%}, worst layer {row['worst_layer']} {row['worst_layer_error']:.1%}"
            for row in self.totals.to_dict("records")
        ]
        parts = "; ".join([*([self.part] if self.part else []), *told])
        return f"Budget({self.rule}, {parts}; tables heads, caches, totals)"


def budget_of(
    run: Run,
    epsilon: Any = None,
    total: Any = None,
    rule: str | None = None,
    weights: str | None = None,
) -> Budget:
    """Keys for a relative error (0.1 unless told), or the best split of a total, under one keep
    rule of a stored probe; random keys when left out.

    ``weights``: how heads count in a split, as of :func:`split_weights`.
    """
    frontier = frontier_of(run)
    epsilon = ALLOWED if epsilon is None and total is None else epsilon
    rule = find_rule(frontier, RANDOM if rule is None else rule)
    found = rule_budget(frontier, rule, epsilon, total, split_weights(run, weights)[0])
    return replace(found, part=measured_part(run))


def frontier_of(run: Run) -> pd.DataFrame:
    """The frontier of a stored probe; of random keys alone where no rules were compared."""
    if run.manifest.job != "probe":
        raise ValueError(
            f"{run.path}: expected a run of esscher probe, got one of {run.manifest.job}"
        )
    if "frontier" in run.tables:
        return run.table("frontier")
    return random_frontier(run.table("heads"), run.table("curves"))


def random_frontier(heads: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """The frontier of random keys from the curves of kept keys. A head without any error, whose
    values are all alike, is left out.
    """
    kv_of = {(int(row.layer), int(row.head)): int(row.kv_head) for row in heads.itertuples()}
    frames = [
        pd.DataFrame(
            {
                "layer": layer,
                "head": head,
                "kv_head": kv_of[layer, head],
                "rule": RANDOM,
                "share": curve.n / curve.n[-1],
                "kept": curve.n.astype(float),
                "keys": float(curve.n[-1]),
                "rms": curve.rms,
                "relative": curve.relative,
                "q95": curve.q95,
            }
        )
        for (layer, head), curve in stored_curves(curves, METRICS["bernoulli"]).items()
        if curve.rms[0] > 0
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"relative": []})


def find_rule(frontier: pd.DataFrame, text: str) -> str:
    """The rule as the frontier names it; ValueError for one that was not measured."""
    wanted, known = str(parse(text)), list(dict.fromkeys(frontier.get("rule", ())))
    if not known:
        raise ValueError("no errors of kept keys in this run; were all of its heads refused?")
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


def rule_budget(
    frontier: pd.DataFrame,
    rule: str,
    epsilon: Any = None,
    total: Any = None,
    weights: Weights | None = None,
) -> Budget:
    """The budget of one rule of a frontier at an error, or the best split of a total.

    ``weights``: gradients of log p at each head's output (:func:`gradients_of`,
    :func:`head_weights`); heads count alike without them.
    """
    epsilon, total = _error_or_total(epsilon, total)
    caches = _Caches(frontier, rule, weights)
    splits = caches.splits(epsilon, total)
    sizes = splits[BEST if epsilon is None else OWN]
    rows = pd.DataFrame(caches.rows(sizes)).assign(best_split=splits[BEST] / UNIT)
    heads = pd.DataFrame(caches.head_rows(sizes, epsilon))
    return Budget(rule, epsilon, total, rows, heads, caches.totals(epsilon, splits))


def budget_table(
    frontier: pd.DataFrame, asked: Sequence[tuple[Any, Any]], weights: Weights | None = None
) -> pd.DataFrame:
    """The totals of every rule, for pairs (error, None) or (None, total)."""
    wanted = [_error_or_total(epsilon, total) for epsilon, total in asked]
    frames = []
    for rule in dict.fromkeys(frontier["rule"]):
        caches = _Caches(frontier, rule, weights)
        for epsilon, total in wanted:
            frames.append(caches.totals(epsilon, caches.splits(epsilon, total)))
    return pd.concat(frames, ignore_index=True)


def _error_or_total(epsilon: Any, total: Any) -> tuple[float | None, int | None]:
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


# ---- Weights of heads in a split.


def split_weights(run: Run, asked: str | None) -> tuple[Weights | None, str]:
    """What the errors of a probe's heads count in a split, None where alike; and that in words.

    ``asked``: None for the gradients that the probe itself measured; ALIKE; or a run of esscher
    compress with the table sensitivity.
    """
    if asked == ALIKE:
        return None, "heads count alike"
    if asked is None:
        own = gradients_of(run.table("heads"))
        told = "alike (no gradients in this run)" if own is None else "by the gradient of log p"
        return own, f"heads count {told}"
    stored = load_run(Path(asked))
    if "sensitivity" not in stored.tables:
        raise ValueError(
            f"weights: {asked} has no table sensitivity; run esscher compress with --sensitivity"
        )
    return head_weights(stored.table("sensitivity")), f"heads count by the gradients of {asked}"


def gradients_of(heads: pd.DataFrame) -> dict[tuple[int, int], float] | None:
    """Root mean square gradient of log p of next tokens at each head's output, from the table
    ``heads``; None where a measured head has none (no language model, or no cache).
    """
    known = heads[heads["status"] == "ok"]
    if "gradient" not in known:
        return None
    sizes = known["gradient"]
    if not np.isfinite(sizes).all() or not (sizes > 0).any():
        return None
    return {(int(row.layer), int(row.head)): float(row.gradient) for row in known.itertuples()}


def head_weights(sensitivity: pd.DataFrame) -> dict[tuple[int, int], float]:
    """The same from a compression run's table ``sensitivity``, mean over its texts."""
    known = sensitivity[sensitivity["plain"] > 0]
    size = (2 * known["nats"]) ** 0.5 / known["plain"]  # root of e'F e over |e|
    sizes = size.groupby([known["layer"], known["head"]]).mean()
    return {(int(layer), int(head)): float(value) for (layer, head), value in sizes.items()}


# ---- The caches of one rule.


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
    counts: Floats  # (heads,): weights of their errors in a split, of root mean square 1

    @classmethod
    def of(cls, layer: int, kv_head: int, rows: pd.DataFrame, rule: str) -> Cache:
        """Heads that read one cache, at the sizes that all of them have."""
        heads, keys = sorted(set(rows["head"])), float(rows["keys"].mean())
        own = rows[rows["rule"] == rule]
        shares = np.unique(own["share"])
        values = np.full((3, len(heads), len(shares)), np.nan)
        place = np.searchsorted(heads, own["head"]), np.searchsorted(shares, own["share"])
        values[:, place[0], place[1]] = own[["kept", "relative", "q95"]].T
        kept, relative, q95 = values[..., np.isfinite(values).all((0, 1))]
        sizes, first = np.unique(np.round(kept.mean(0) * UNIT).astype(np.int64), return_index=True)
        below = (sizes > 0) & (sizes < round(keys * UNIT))
        errors, largest = (_falling(values[:, first[below]]) for values in (relative, q95))
        sizes = np.append(sizes[below], round(keys * UNIT))
        counts = np.ones(len(heads))
        return cls(layer, kv_head, tuple(map(int, heads)), keys, sizes, errors, largest, counts)

    def curve(self, counts: Floats) -> ErrorCurve:
        """Squared relative errors summed over the heads, each with its weight."""
        rms = np.sqrt(np.square(counts[:, None] * self.rms).sum(0))
        scale = math.sqrt(float(np.square(counts).sum()))
        return ErrorCurve(n=self.sizes, rms=rms, kind="exact", scale=scale)

    @cached_property
    def counted(self) -> ErrorCurve:
        return self.curve(self.counts)

    def needed(self, epsilon: float) -> int:
        return tokens_needed(self.curve(np.ones(len(self.heads))), epsilon)

    def alone(self) -> Iterator[Cache]:
        """Its query heads, as if each had the cache for itself."""
        for i, head in enumerate(self.heads):
            rows = {name: getattr(self, name)[[i]] for name in ("rms", "q95", "counts")}
            yield replace(self, heads=(head,), **rows)

    def at(self, size: int) -> tuple[Floats, float]:
        """Errors of the heads at a size, and the largest 95 % quantile."""
        heights = [float(height(math.log(size))) for height in self._between]
        return np.exp(heights[:-1]), math.exp(heights[-1])

    @cached_property
    def _between(self) -> list[Any]:
        rows = [*self.rms, self.q95.max(0)]
        return [log_rms(ErrorCurve(n=self.sizes, rms=row, kind="exact")) for row in rows]

    def kept(self, size: int) -> dict[str, float]:
        """Columns of the cache with so many keys."""
        rms, q95 = self.at(size)
        return {
            "n_keys": self.keys,
            "keys": size / UNIT,
            "ratio": size / float(self.sizes[-1]),
            "error": math.sqrt(float(np.square(rms).mean())),
            "q95": q95,
        }


def _falling(errors: Floats) -> Floats:
    """The largest error from each size on, (heads, sizes), and 0 where all keys are kept."""
    largest = np.maximum.accumulate(np.maximum(errors, FEWEST)[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate([largest, np.zeros((len(errors), 1))], axis=1)


def caches_of(frontier: pd.DataFrame, rule: str, weights: Weights | None = None) -> list[Cache]:
    """The key-value heads that have errors of any rule; one that this rule has no size for needs
    all of its keys.

    With weights a head's relative error counts as much as the weight times the size of its output.
    """
    known = frontier[np.isfinite(frontier["relative"])]
    if not len(known):
        raise ValueError("no errors of kept keys in this run; were all of its heads refused?")
    with np.errstate(invalid="ignore"):  # no error, no quantile
        q95 = np.where(known["rms"] > 0, known["q95"] * known["relative"] / known["rms"], 0.0)
    groups = known.assign(q95=q95).groupby(["layer", "kv_head"], sort=True)
    caches = [Cache.of(int(layer), int(kv), rows, rule) for (layer, kv), rows in groups]
    if weights is None:
        return caches
    size = (known["rms"] / known["relative"]).where(known["relative"] > 0)
    sizes = size.groupby([known["layer"], known["head"]]).median()
    if missing := [place for place in sizes.index if place not in weights]:
        raise ValueError(
            f"weights: there is none of head {missing[0][0]}.{missing[0][1]}; measure all heads of"
            " the probe"
        )
    counts = {place: weights[place] * (size if size > 0 else 0.0) for place, size in sizes.items()}
    scale = math.sqrt(float(np.square(list(counts.values())).mean())) or 1.0
    return [
        replace(cache, counts=np.array([counts[cache.layer, head] / scale for head in cache.heads]))
        for cache in caches
    ]


class _Caches:
    """The caches of a rule, prepared for many sizes and totals."""

    def __init__(self, frontier: pd.DataFrame, rule: str, weights: Weights | None) -> None:
        self.rule, self.caches = rule, caches_of(frontier, rule, weights)
        self.sharing = Sharing([cache.counted for cache in self.caches])

    def splits(self, epsilon: float | None, total: int | None) -> dict[str, Counts]:
        """At an error: each cache what its own heads need, the same share for all, and the best
        split, these two with that error over all heads. Of a total: these two.
        """
        sharing = self.sharing
        if total is not None:
            low, high = math.ceil(sharing.least.sum() / UNIT), int(sharing.most.sum() / UNIT)
            if not low <= total <= high:
                raise ValueError(
                    f"total: expected between {low} (the smallest sizes of {self.rule} measured)"
                    f" and {high} keys (all), got {total}"
                )
            both = sharing.split(total * UNIT)
            return {UNIFORM: both.uniform, BEST: both.tokens}
        assert epsilon is not None
        target = epsilon**2 * sum(cache.counted.scale**2 for cache in self.caches)
        return {
            OWN: np.array([cache.needed(epsilon) for cache in self.caches]),
            UNIFORM: sharing.split(sharing.fewest(target, uniform=True)).uniform,
            BEST: sharing.split(sharing.fewest(target)).tokens,
        }

    def rows(self, sizes: Counts) -> Iterator[dict[str, Any]]:
        for cache, size in zip(self.caches, sizes.tolist(), strict=True):
            place = {"layer": cache.layer, "kv_head": cache.kv_head, "heads": len(cache.heads)}
            yield place | cache.kept(size)

    def head_rows(self, sizes: Counts, epsilon: float | None) -> Iterator[dict[str, Any]]:
        """Query heads: with the keys of their cache, or at an error with those each would need."""
        for cache, size in zip(self.caches, sizes.tolist(), strict=True):
            for head in cache.alone():
                own = size if epsilon is None else head.needed(epsilon)
                place = {"layer": cache.layer, "head": head.heads[0], "kv_head": cache.kv_head}
                yield place | head.kept(own)

    def totals(self, epsilon: float | None, splits: dict[str, Counts]) -> pd.DataFrame:
        return pd.DataFrame([self._total(epsilon, split, sizes) for split, sizes in splits.items()])

    def _total(self, epsilon: float | None, split: str, sizes: Counts) -> dict[str, Any]:
        found = [cache.at(size) for cache, size in zip(self.caches, sizes.tolist(), strict=True)]
        counted, heads, layers = 0.0, dict[str, float](), dict[str, list[float]]()
        for cache, (rms, _) in zip(self.caches, found, strict=True):
            counted += float(np.square(cache.counts * rms).sum())
            heads |= {f"{cache.layer}.{h}": float(e) for h, e in zip(cache.heads, rms, strict=True)}
            layers.setdefault(str(cache.layer), []).extend(np.square(rms).tolist())
        layer_errors = {layer: math.sqrt(np.mean(squares)) for layer, squares in layers.items()}
        head, layer = (max(each, key=each.__getitem__) for each in (heads, layer_errors))
        keys, most = float(sizes.sum()) / UNIT, float(self.sharing.most.sum()) / UNIT
        return {
            "epsilon": math.nan if epsilon is None else epsilon,
            "rule": self.rule,
            "split": split,
            "chosen": "for each query" if per_query(self.rule) else "once",
            "keys": keys,
            "ratio": keys / most,
            "saved": 1 - keys / most,
            "error": math.sqrt(counted / len(heads)),
            "q95": max(q95 for _, q95 in found),
            "worst": heads[head],
            "worst_head": head,
            "worst_layer_error": layer_errors[layer],
            "worst_layer": layer,
        }


# ---- Exports: a record of every key-value head (JSON, YAML), and kvpress's array.


def budget_record(found: Budget, about: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of every cache, with the error it leaves, and what that holds for."""
    split = BEST if found.epsilon is None else OWN
    (total,) = found.totals[found.totals["split"] == split].to_dict("records")
    kept = ("layer", "kv_head", "n_keys", "keys", "ratio", "error", "q95")
    names = [column.key for column in BUDGET if column.key not in ("epsilon", "saved")]
    return {
        **about,
        **{name: _plain(total[name]) for name in names},
        "epsilon": found.epsilon,
        "total": found.total,
        "caches": [
            {name: _plain(row[name]) for name in kept} for row in found.caches.to_dict("records")
        ],
    }


def _plain(value: Any) -> Any:
    """Neither JSON nor kvpress knows NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_bytes(content: dict[str, Any] | npt.NDArray[np.float32], kind: str, ending: str) -> bytes:
    """The content of a file: an array is .npy where its name ends so, else nested lists."""
    if isinstance(content, np.ndarray):
        if ending == ".npy":
            file = io.BytesIO()
            np.save(file, content, allow_pickle=False)
            return file.getvalue()
        return (json.dumps(content.astype(float).round(6).tolist()) + "\n").encode()
    if kind == "yaml":
        return str(yaml.safe_dump(content, sort_keys=False)).encode()
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def prune_ratios(
    frontier: pd.DataFrame, rule: str, layers: int, kv_heads: int, weights: Weights | None = None
) -> npt.NDArray[np.float32]:
    """Shares to drop of each cache, (99, layers, kv_heads), as kvpress's per-head press reads them:
    row i is the best split that drops (i + 1) % of the keys that all caches hold.

    Below the smallest size that was measured every cache shrinks in proportion.
    """
    parts = parse(rule).parts
    if per_query(rule) or any(isinstance(part, Strided) for part in parts):
        raise ValueError(
            f"kvpress: {rule} chooses keys for each query, so that the cache holds all, and a press"
            " chooses once; give another rule"
        )
    if any(isinstance(part, Chance) and part.reweight for part in parts):
        raise ValueError(
            f"kvpress: {rule} gives kept keys weights of 1/p, and a press has no weights; give"
            " another rule"
        )
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
        few = total < least
        kept = sharing.least * (total / least) if few else sharing.steepest_first(total)[0]
        found[percent - 1] = 1 - kept / sharing.most
    return found.reshape(99, layers, kv_heads).astype(np.float32)
