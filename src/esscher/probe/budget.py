"""Keys that a keep rule needs: for an error of each head, for a predicted loss of the model in
nats, and the best split of a total.

Everything is read from a frontier: the relative error of every head at a ladder of sizes, for each
keep rule, and in a language model its predicted KL in nats. All keys kept is no error, the last
size of every ladder; between sizes logarithms are interpolated. A size counts for the largest error
from it on, so that more keys never cost.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from esscher.errors.budget import Counts, Sharing, log_rms, tokens_needed
from esscher.errors.curve import ErrorCurve, Floats
from esscher.hf.gradients import SECOND_ORDER
from esscher.inputs import as_count, as_positive
from esscher.intervals import mean_interval
from esscher.keep import Strided, parse
from esscher.keep.rule import WHERE, Chance
from esscher.probe.session import measured_part
from esscher.probe.spec import ALLOWED, FLOOR, SHARES
from esscher.runs import Run, load_run
from esscher.runs.columns import Column, with_ends

OWN, UNIFORM, CUT, BEST = ("every head at the error", "uniform", "one cut", "best split")
LOSS = 0.05  # nats per token that a budget allows unless told, where heads have losses
UNIT = 1000  # sizes are counted in thousandths of a key: a mean number of keys is not whole
FEWEST = 1e-9  # relative errors below are rounding; a curve is 0 at its last size only
THRESHOLDS = 2000  # tried for one cut over all heads
SHOWN = (0.05, 0.1, 0.2)  # shares of the cache at which the kept tokens are shown

SHARE = (
    "Keys kept over keys that the cache holds, summed over layers and key-value heads; a"
    " sliding-window layer holds at most its window."
)
PREDICTED = (
    "Predicted divergence of next tokens when all heads lose their keys, nats per token, for"
    " queries of the text after the cache was cut: half of e'F e summed over heads."
)
NATS = (
    *with_ends(Column("nats", "float", "predicted KL", PREDICTED), "interval over windows"),
    Column(
        "beyond",
        "bool",
        "beyond second order",
        f"Whether it is above {SECOND_ORDER} nats, where the loss is larger than predicted.",
        short="beyond",
    ),
)
BUDGET = (
    Column("epsilon", "float", "error allowed", "Relative error that is allowed.", short="asked"),
    Column("kl", "float", "loss allowed", "Loss that is allowed, nats per token."),
    Column("rule", "word", "eviction rule", "Rule that says which keys are kept.", short="rule"),
    Column("split", "word", "split", "How the kept keys are shared between heads."),
    Column(
        "where",
        "word",
        "where it can run",
        "any cache: the keys are chosen once and dropped; needs weights: kept keys count 1/p in"
        " attention; needs all keys: each query chooses, so the cache holds all.",
        short="runs on",
        words=WHERE,
    ),
    Column("keys", "float", "keys", "Keys kept in all caches of one context of mean length."),
    Column("ratio", "float", "share of the cache kept", SHARE, short="of the cache"),
    Column("saved", "float", "saved", "Share of the cache that is dropped: 1 - share kept."),
    Column("error", "float", "error", "Relative error: root mean square over heads."),
    Column("worst", "float", "largest error", "Relative error of the worst head.", short="worst"),
    Column("worst_head", "word", "worst head", "Layer and head of the largest error."),
    *NATS,
)
_OF = {column.key: column for column in BUDGET}
MODEL = (
    *(_OF[key] for key in ("rule", "split", "where")),
    Column("share", "float", "share", "Share of all caches' keys that was given.", "log"),
    *(_OF[key] for key in ("keys", "ratio")),
    *NATS,
)

KEPT = (
    Column("position", "int", "position", "Place in the first prompt, from 0."),
    Column("token", "word", "token", "Its text."),
    Column("heads", "list", "heads", "Key-value heads that keep it, by layer."),
    Column("heads_all", "list", "all heads", "Key-value heads of each layer."),
)
TOKENS = (
    *(_OF[key] for key in ("rule", "split")),
    Column("keep", "float", "keep", "Share of the cache that is kept.", "log"),
    *KEPT,
)


class Asked(NamedTuple):
    """What a budget is for: a relative error of heads, a total of keys, or a predicted loss in
    nats. One of the three.
    """

    epsilon: float | None = None
    total: int | None = None
    kl: float | None = None

    @property
    def words(self) -> str:
        if self.kl is not None:
            return f"a loss of {self.kl:g} nats per token"
        if self.epsilon is not None:
            return f"an error of {self.epsilon:.0%} in each head's output"
        return f"{self.total:,} keys in all"

    @property
    def split(self) -> str:
        """The split whose keys are told head by head."""
        return BEST if self.epsilon is None else OWN

    @property
    def by(self) -> str:
        """The column of BUDGET that is least for the best rule."""
        return "ratio" if self.total is None else "error"


def as_asked(epsilon: Any = None, total: Any = None, kl: Any = None) -> Asked:
    """Checked."""
    if sum(x is not None for x in (epsilon, total, kl)) != 1:
        given = f"epsilon {epsilon}, total {total}, kl {kl}"
        raise ValueError(f"budget: expected one of an error, a total and a loss, got {given}")
    if total is not None:
        return Asked(total=as_count(total, "total"))
    if kl is not None:
        return Asked(kl=as_positive(kl, "kl"))
    epsilon = as_positive(epsilon, "epsilon")
    if epsilon >= 1:
        raise ValueError(f"epsilon: expected a relative error between 0 and 1, got {epsilon:g}")
    return Asked(epsilon)


@dataclass(frozen=True, repr=False)
class Budget:
    """Keys that a rule keeps. ``caches``: a row per key-value head; ``totals``: per split, with the
    columns of BUDGET; ``rules``: the totals of every rule, where none was named.

    ``keys``, ``ratio``: kept for a root mean square error of ``epsilon`` over the heads that read
    the cache, or in the best split of ``total`` or for ``kl``; ``error``, ``nats``: then.
    ``best_split``: keys in the best split. ``part``: of the model that was measured.
    """

    rule: str
    asked: Asked
    caches: pd.DataFrame
    totals: pd.DataFrame
    part: str = ""
    rules: pd.DataFrame | None = None

    def __repr__(self) -> str:
        told = [
            f"{row['split']} keeps {row['ratio']:.1%}, worst head {row['worst_head']}"
            f" {row['worst']:.1%}"
            for row in self.totals.to_dict("records")
        ]
        parts = "; ".join([*([self.part] if self.part else []), *told])
        tables = "caches, totals" + ", rules" * (self.rules is not None)
        return f"Budget({self.rule}, {parts}; tables {tables})"

    def _repr_html_(self) -> str:
        """The rules in their best split, or the splits of one rule, below a line of words."""
        rows = self.totals if self.rules is None else rank_rules(self.rules, self.asked.by)
        keys = ("rule", "split", "ratio", "nats", "nats_low", "nats_high", "error", "where")
        labels = {key: _OF[key].short or _OF[key].label for key in keys if key in rows}
        table = rows[list(labels)].rename(columns=labels)
        line = html.escape(f"{self.rule} for {self.asked.words}; {self.part}")
        return f"<div>{line}{table.to_html(index=False, float_format='{:.3g}'.format)}</div>"


def budget(
    run: Run | str | os.PathLike[str],
    rule: str | None = None,
    *,
    epsilon: Any = None,
    total: Any = None,
    kl: Any = None,
) -> Budget:
    """The keys that a stored probe says a cache must keep: what ``esscher budget`` prints.

    Give one of ``epsilon`` (relative error of each head's output), ``total`` (keys to split between
    all heads) and ``kl`` (loss in nats per token); without any, ``kl`` is 0.05 in a language model
    and ``epsilon`` 0.1 elsewhere. ``rule``: one that the run measured; when left out, the rule for
    any cache that needs the fewest keys, and ``rules`` compares all.
    """
    run = run if isinstance(run, Run) else load_run(run)
    frontier, rules = frontier_of(run), None
    if epsilon is None and total is None and kl is None:
        asked = Asked(kl=LOSS) if _priced(frontier) else Asked(ALLOWED)
    else:
        asked = as_asked(epsilon, total, kl)
    if asked.kl is not None and not _priced(frontier):
        raise ValueError(
            f"kl: {run.path} has no losses in nats: the model has no language head, or cannot"
            " continue from a cache"
        )
    if rule is None:
        rules = budget_table(frontier, [asked])
        rule = str(rank_rules(rules, asked.by)["rule"].iloc[0])
    found = rule_budget(frontier, find_rule(frontier, rule), *asked)
    return replace(found, part=measured_part(run), rules=rules)


def rank_rules(totals: pd.DataFrame, by: str = "ratio") -> pd.DataFrame:
    """Every rule in its best split, with the share of its uniform split: rules for any cache come
    first, of these the one with the fewest keys, or the least of ``by``; the bound comes last.
    """
    alike = totals[totals["split"] == UNIFORM].drop_duplicates("rule").set_index("rule")["ratio"]
    rows = totals[totals["split"] == BEST]
    rows = rows.assign(uniform=rows["rule"].map(alike), bound=rows["rule"] == FLOOR)
    order = ["bound", "where", by, *(["nats"] if "nats" in rows else [])]
    return rows.sort_values(order, kind="stable")


def frontier_of(run: Run) -> pd.DataFrame:
    """The frontier of a stored probe."""
    if run.manifest.job != "probe":
        raise ValueError(
            f"{run.path}: expected a run of esscher probe, got one of {run.manifest.job}"
        )
    if "frontier" not in run.tables:
        raise ValueError(
            f"{run.path}: no keep rules were compared; run esscher probe with --pool sequence"
        )
    return run.table("frontier")


def _priced(frontier: pd.DataFrame) -> bool:
    """Whether every head has losses in nats."""
    return "nats" in frontier and bool(frontier["nats"].notna().all())


def find_rule(frontier: pd.DataFrame, text: str) -> str:
    """The rule as the frontier names it; ValueError for one that was not measured."""
    wanted, known = str(parse(text)), list(dict.fromkeys(frontier.get("rule", ())))
    if not known:
        raise ValueError("no errors of kept keys in this run: no rules, or no heads measured")
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
    frontier: pd.DataFrame, rule: str, epsilon: Any = None, total: Any = None, kl: Any = None
) -> Budget:
    """The budget of one rule of a frontier: for an error, a loss or a total."""
    asked = as_asked(epsilon, total, kl)
    caches = RuleCaches(frontier, rule)
    splits = caches.splits(asked)
    rows = []
    for cache, size in zip(caches.caches, splits[asked.split].tolist(), strict=True):
        errors, nats = cache.at(size)
        row = {
            "layer": cache.layer,
            "kv_head": cache.kv_head,
            "heads": len(cache.heads),
            "n_keys": cache.keys,
            "keys": size / UNIT,
            "ratio": size / float(cache.sizes[-1]),
            "error": math.sqrt(float(np.square(errors).mean())),
        }
        rows.append(row | ({"nats": float(nats.mean())} if len(nats) else {}))
    frame = pd.DataFrame(rows).assign(best_split=splits[BEST] / UNIT)
    return Budget(rule, asked, frame, caches.totals(asked, splits))


def budget_table(frontier: pd.DataFrame, asked: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """The totals of every rule, for each of some errors, totals or losses (:class:`Asked`)."""
    frames = []
    for rule in _sized(frontier):
        caches = RuleCaches(frontier, rule)
        for one in (as_asked(*each) for each in asked):
            frames.append(caches.totals(one, caches.splits(one)))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _sized(frontier: pd.DataFrame) -> list[str]:
    """The rules that have a size to choose."""
    return [rule for rule in dict.fromkeys(frontier["rule"]) if parse(rule).free is not None]


def nats_table(frontier: pd.DataFrame) -> pd.DataFrame:
    """The predicted loss of the model for every rule, share of all keys and split; no rows where
    heads have no losses in nats.
    """
    rows = []
    for rule in _sized(frontier) if _priced(frontier) else ():
        caches = RuleCaches(frontier, rule)
        for share in SHARES:
            found = caches.totals(Asked(), caches.of_share(share)).assign(share=share)
            rows.append(found[[column.key for column in MODEL]])
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def kept_tokens(frontier: pd.DataFrame, order: pd.DataFrame, words: list[str]) -> pd.DataFrame:
    """How many key-value heads of each layer keep each token of a window, in the best split of the
    recommended rule: at the size for LOSS, and at the shares SHOWN of the cache.

    ``order``: the positions of the keys of a head, the last dropped first, by rule; ``words``: the
    texts of the tokens. Of rules the best that has an order.
    """
    ranked = rank_rules(budget_table(frontier, [Asked(kl=LOSS)]))["rule"]
    rule = next(name for name in ranked if name in set(order["rule"]))
    own = order[order["rule"] == rule].set_index(["layer", "kv_head"])["positions"]
    caches, rows = RuleCaches(frontier, rule), {}
    layers = sorted({layer for layer, _ in own.index})
    every = [int((own.index.get_level_values(0) == layer).sum()) for layer in layers]
    for splits in (caches.splits(Asked(kl=LOSS)), *map(caches.of_share, SHOWN)):
        counts = np.zeros((len(words), len(layers)), dtype=np.int64)
        for cache, size in zip(caches.caches, splits[BEST].tolist(), strict=True):
            if (cache.layer, cache.kv_head) in own.index:
                places = own[cache.layer, cache.kv_head][: round(size / UNIT)]
                counts[places, layers.index(cache.layer)] += 1
        rows[float(splits[BEST].sum() / caches.sharing.most.sum())] = counts
    tokens = [
        {"rule": rule, "split": BEST, "keep": keep, "position": i, "token": words[i]}
        | {"heads": heads, "heads_all": every}
        for keep, counts in rows.items()
        for i, heads in enumerate(counts.tolist())
    ]
    return pd.DataFrame(tokens)


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
    nats: Floats | None  # (sizes,): root of the predicted loss, all heads together
    windows: Floats  # (windows, sizes): the loss of each window over their mean
    cut: Floats  # (sizes,): score of the last key kept, as a logarithm; NaN where there is none

    @classmethod
    def of(cls, layer: int, kv_head: int, rows: pd.DataFrame, rule: str) -> Cache:
        """Heads that read one cache, at the sizes that all of them have."""
        heads, keys = sorted(set(rows["head"])), float(rows["keys"].mean())
        own = rows[rows["rule"] == rule]
        shares = np.unique(own["share"])
        numbers = own[["kept", "relative", "cut"]].to_numpy().T
        if "nats_windows" in own and len(own):
            numbers = np.concatenate([numbers, np.stack(own["nats_windows"]).T])
        values = np.full((len(numbers), len(heads), len(shares)), np.nan)
        place = np.searchsorted(heads, own["head"]), np.searchsorted(shares, own["share"])
        values[:, place[0], place[1]] = numbers
        values = values[..., np.isfinite(values[:2]).all((0, 1))]
        sizes, first = np.unique(
            np.round(values[0].mean(0) * UNIT).astype(np.int64), return_index=True
        )
        below = (sizes > 0) & (sizes < round(keys * UNIT))
        _, relative, cut = values[:3, :, first[below]]
        windows, nats = values[3:, :, first[below]].sum(1), None
        if len(windows):
            mean = windows.mean(0)
            nats = _falling(np.sqrt(mean)[None])[0]
            windows = windows / np.where(mean > 0, mean, 1.0)
        sizes, scores = np.append(sizes[below], round(keys * UNIT)), np.full(1, np.nan)
        if len(cut[0]):  # the last score, of all keys, by the last slope
            scores = np.minimum.accumulate(np.sign(cut[0]) * np.log1p(1e30 * np.abs(cut[0])))
            rise, steps = np.diff(scores)[-1:].sum() or -1.0, np.diff(np.log(sizes))
            scores = np.append(scores, scores[-1] + rise * steps[-1] / steps[-2:][0])
        names = tuple(int(head) for head in heads)
        return cls(layer, kv_head, names, keys, sizes, _falling(relative), nats, windows, scores)

    @cached_property
    def relative(self) -> ErrorCurve:
        """Squared relative errors summed over the heads."""
        rms, scale = np.sqrt(np.square(self.rms).sum(0)), math.sqrt(len(self.heads))
        return ErrorCurve(n=self.sizes, rms=rms, kind="exact", scale=scale)

    @cached_property
    def between(self) -> list[Callable[[Any], Floats]]:
        """Logarithms of the errors of the heads, and of the root of the loss, against log size."""
        rows = [*self.rms] + ([] if self.nats is None else [self.nats])
        return [log_rms(ErrorCurve(n=self.sizes, rms=row, kind="exact")) for row in rows]

    def at(self, size: int) -> tuple[Floats, Floats]:
        """Errors of the heads at a size, and losses of the windows."""
        place = math.log(size)
        found = np.exp([float(height(place)) for height in self.between])
        if self.nats is None:
            return found, np.empty(0)
        known = np.log(self.sizes[:-1].astype(float))
        windows = np.array([np.interp(place, known, row) for row in self.windows])
        return found[:-1], found[-1] ** 2 * windows


def _falling(errors: Floats) -> Floats:
    """The largest error from each size on, (heads, sizes), and 0 where all keys are kept."""
    largest = np.maximum.accumulate(np.maximum(errors, FEWEST)[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate([largest, np.zeros((len(errors), 1))], axis=1)


class RuleCaches:
    """The key-value heads that have errors of any rule, under one rule; one that this rule has no
    size for needs all of its keys. Prepared for many sizes and totals.
    """

    def __init__(self, frontier: pd.DataFrame, rule: str) -> None:
        known = frontier[np.isfinite(frontier["relative"])]
        if not len(known):
            raise ValueError("no errors of kept keys in this run: no rules, or no heads measured")
        self.rule, self.priced = rule, _priced(frontier)
        if not self.priced:
            known = known.drop(columns="nats_windows", errors="ignore")
        groups = known.assign(cut=known.get("cut", math.nan)).groupby(["layer", "kv_head"])
        self.caches = [Cache.of(int(layer), int(kv), rows, rule) for (layer, kv), rows in groups]

    @cached_property
    def sharing(self) -> Sharing:
        """What a split makes small: the predicted loss where it is known, else relative errors."""
        if not self.priced:
            return self.by_error
        roots = [(cache.sizes, cache.nats) for cache in self.caches if cache.nats is not None]
        return Sharing([ErrorCurve(n=n, rms=rms, kind="exact") for n, rms in roots])

    @cached_property
    def by_error(self) -> Sharing:
        return Sharing([cache.relative for cache in self.caches])

    def splits(self, asked: Asked) -> dict[str, Counts]:
        """At an error: each cache what its own heads need, the same share for all, and the best
        split, these two with that error over all heads. For a loss, or of a total: the last two,
        and one cut where a rule has scores.
        """
        if asked.epsilon is not None:
            target = asked.epsilon**2 * sum(len(cache.heads) for cache in self.caches)
            own = [tokens_needed(cache.relative, asked.epsilon) for cache in self.caches]
            return {OWN: np.array(own), **_fewest(self.by_error, target)}
        sharing = self.sharing
        if (kl := asked.kl) is not None:
            found = _fewest(sharing, kl)
            cut = self._cut(lambda sizes: sharing.squared_error(sizes) <= kl, enough=True)
        else:
            assert asked.total is not None
            low, high = math.ceil(sharing.least.sum() / UNIT), int(sharing.most.sum() / UNIT)
            if not low <= asked.total <= high:
                raise ValueError(
                    f"total: expected between {low} (the smallest sizes of {self.rule} measured)"
                    f" and {high} keys (all), got {asked.total}"
                )
            total = asked.total * UNIT
            found = {UNIFORM: sharing.uniform(total), BEST: sharing.best(total)}
            cut = self._cut(lambda sizes: int(sizes.sum()) > total, enough=False)
        return found if cut is None else {UNIFORM: found[UNIFORM], CUT: cut, BEST: found[BEST]}

    def _cut(self, passed: Callable[[Counts], bool], *, enough: bool) -> Counts | None:
        """Sizes above one score in all caches: the first, as the score falls, that passed; or the
        last that did not (``enough=False``). None for a rule without scores.
        """
        scores = [cache.cut for cache in self.caches]
        if not all(np.isfinite(cut).all() for cut in scores):
            return None
        known = np.unique(np.concatenate(scores))[::-1]
        tried = np.interp(np.linspace(0, len(known) - 1, THRESHOLDS), np.arange(len(known)), known)

        def above(score: float) -> Counts:
            logs = [np.interp(-score, -cache.cut, np.log(cache.sizes)) for cache in self.caches]
            return np.exp(logs).round().astype(np.int64)

        low, high = -1, len(tried) - 1  # the last keeps all
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if passed(above(tried[middle])) else (middle, high)
        return above(tried[high if enough else max(low, 0)])

    def of_share(self, share: float) -> dict[str, Counts]:
        """The splits of this share of all keys, or of the fewest that the rule has sizes for."""
        least, most = self.sharing.least.sum(), self.sharing.most.sum()
        return self.splits(Asked(total=math.ceil(max(share * most, least) / UNIT)))

    def totals(self, asked: Asked, splits: dict[str, Counts]) -> pd.DataFrame:
        """A row for each split, with the columns of BUDGET."""
        return pd.DataFrame([self._total(asked, split, sizes) for split, sizes in splits.items()])

    def _total(self, asked: Asked, split: str, sizes: Counts) -> dict[str, Any]:
        heads, losses = dict[str, float](), []
        for cache, size in zip(self.caches, sizes.tolist(), strict=True):
            errors, nats = cache.at(size)
            for head, error in zip(cache.heads, errors.tolist(), strict=True):
                heads[f"{cache.layer}.{head}"] = error
            losses.append(nats)
        worst = max(heads, key=heads.__getitem__)
        keys, most = float(sizes.sum()) / UNIT, float(self.sharing.most.sum()) / UNIT
        row = {
            "epsilon": math.nan if asked.epsilon is None else asked.epsilon,
            "kl": math.nan if asked.kl is None else asked.kl,
            "rule": self.rule,
            "split": split,
            "where": parse(self.rule).where,
            "keys": keys,
            "ratio": keys / most,
            "saved": 1 - keys / most,
            "error": math.sqrt(np.square(list(heads.values())).mean()),
            "worst": heads[worst],
            "worst_head": worst,
        }
        if not self.priced:
            return row
        mean, low, high = mean_interval(sum(losses), least=0.0)
        ends = {"nats_low": low, "nats_high": high}
        return row | {"nats": mean, **ends, "beyond": mean > SECOND_ORDER}


def _fewest(sharing: Sharing, target: float) -> dict[str, Counts]:
    """The fewest keys with this summed squared error, in the uniform and in the best split."""
    uniform = sharing.fewest(target, sharing.uniform)
    best = sharing.fewest(target, sharing.steepest_first)
    return {UNIFORM: sharing.uniform(uniform), BEST: sharing.best(best)}


# ---- kvpress


def prune_ratios(run: Run, rule: str | None) -> npt.NDArray[np.float32]:
    """Shares to drop of each cache, (99, layers, kv_heads), as kvpress's press with a budget for
    each head reads them: row i is the best split that drops (i + 1) % of the keys of all caches.

    Below the smallest size that was measured every cache shrinks in proportion.
    """
    frontier, about = frontier_of(run), run.table("about").iloc[0]
    names = list(dict.fromkeys(frontier["rule"]))
    if rule is None and len(names) > 1:
        raise ValueError(f"--kvpress: give the rule, one of {', '.join(names)}")
    rule = find_rule(frontier, rule or names[0])
    parts = parse(rule).parts
    moves = per_query(rule) or any(isinstance(part, Strided) for part in parts)
    if moves or any(isinstance(part, Chance) and part.reweight for part in parts):
        raise ValueError(
            f"--kvpress: {rule} chooses keys for each query or gives them weights; a press drops"
            " keys once and has no weights; give another rule"
        )
    known = RuleCaches(frontier, rule)
    layers, kv_heads = int(about["layers"]), int(about["kv_heads"])
    if len(known.caches) < layers * kv_heads:
        raise ValueError(
            f"--kvpress: expected {kv_heads} key-value heads of {layers} layers, got"
            f" {len(known.caches)} in all; probe all layers and heads"
        )
    least, most = known.sharing.least, known.sharing.most
    found = []
    for percent in range(1, 100):
        total = round((100 - percent) / 100 * int(most.sum()))
        few = total < least.sum()
        kept = least * (total / least.sum()) if few else known.sharing.steepest_first(total)
        found.append(1 - kept / most)
    return np.array(found, dtype=np.float32).reshape(99, layers, kv_heads)
