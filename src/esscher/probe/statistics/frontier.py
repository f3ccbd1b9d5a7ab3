"""The exact error of every keep rule against the keys it keeps, in the queries' own contexts; what
it takes to reach an error.

Rules that choose one set for all queries choose by other queries than those that their error is the
mean over (:class:`esscher.probe.session.Asked`).

Whether a head streams, retrieves or is diffuse follows from three of them: sinks:4+recent, random,
and the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.errors.curve import CURVE
from esscher.keep import parse
from esscher.probe.curves import at_error, percent
from esscher.probe.rules import RuleErrors
from esscher.probe.spec import FLOOR, SHARES, ProbeSpec
from esscher.probe.statistics.base import (
    ACCURACY,
    HEAD,
    KV_HEAD,
    LAYER,
    Block,
    Findings,
    Found,
    Order,
    Start,
    Statistic,
)
from esscher.runs.columns import Column

Floats = npt.NDArray[np.float64]

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
    """The state is the errors of the queries of some windows; none for the others, nor where the
    pool is the corpus.
    """

    name = "frontier"
    reads = ("identity",)
    state = RuleErrors

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        if not spec.compared:
            return ()
        return (
            *KIND,
            RULE_KEYS,
            *(column for epsilon in spec.epsilons for column in _reached(epsilon)),
        )

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"frontier": FRONTIER} if spec.compared else {}

    def update(self, state: None, block: Block) -> RuleErrors | None:
        """A query's own context is one block."""
        return None if block.by_rule is None else block.by_rule()

    def stack(self, states: Sequence[RuleErrors | None], order: Order) -> RuleErrors | None:
        """Those that there are; which query is which is no matter any more."""
        known = [state for state in states if state is not None]
        return (
            RuleErrors(
                *(
                    torch.cat([getattr(one, part.name) for one in known])
                    for part in fields(RuleErrors)
                )
            )
            if known
            else None
        )

    def finish(self, state: RuleErrors | None, found: Found) -> Findings:
        if state is None:
            return Findings()
        keys = float(state.keys.double().mean())
        rows = _rows(state, found.spec.compared).assign(
            kv_head=found.row["kv_head"], keys=keys, queries=len(state.keys)
        )
        curves = {str(rule): own for rule, own in rows.groupby("rule", sort=False)}
        columns = _kind(curves, keys) | {RULE_KEYS.key: keys}
        for epsilon in found.spec.epsilons:
            needed = {rule: _needed(own, epsilon) for rule, own in curves.items()}
            columns |= {at_error(name, epsilon): value for name, value in _fewest(needed).items()}
        return Findings(columns, {"frontier": rows})


def _rows(state: RuleErrors, rules: tuple[str, ...]) -> pd.DataFrame:
    """A row for each rule and share that every query's window has keys enough for; the same sizes
    once.
    """
    mse, kept, oracle = state.mse.numpy(), state.kept.numpy(), state.oracle.numpy()
    again = np.zeros(mse.shape[1:], dtype=bool)
    again[:, 1:] = ((mse[..., 1:] == mse[..., :-1]) & (kept[..., 1:] == kept[..., :-1])).all(0)
    rms = np.sqrt(mse.mean(0))
    rule, share = np.nonzero(np.isfinite(rms) & ~again)
    limit = np.sqrt(state.limit.double().mean().numpy())
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
            "queries_choosing": state.choosing.numpy().min(0)[rule],
            "accuracy": state.accuracy.numpy().max(0)[rule],
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
        return float(
            1 / (1 / keys + (epsilon / error[-1]) ** 2 * max(1 / kept[-1] - 1 / keys, 0.0))
        )
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
    cached = {
        rule: keys
        for rule, keys in rules.items()
        if not any(part.per_query for part in parse(rule).parts)
    }
    best, cache = (
        min(rules, key=rules.__getitem__, default=NONE),
        min(cached, key=cached.__getitem__, default=NONE),
    )
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
    kind = (
        "streams"
        if stream <= min(STREAMS, chance)
        else "diffuse"
        if chance <= DIFFUSE * shares[best]
        else "retrieves"
    )
    needs = ", ".join(
        f"{rule} {shares[rule]:.1%}" for rule in dict.fromkeys((STREAM, CHANCE, best))
    )
    return {
        "kind": kind,
        "kind_reason": f"{KINDS[kind]}; of the keys, for an error of {percent(ERROR)} %: {needs}",
    }


# ---- columns
# ------------------------------------------------------------------------------------------

KIND = (
    Column(
        "kind",
        "word",
        "kind of head",
        f"For a relative error of {percent(ERROR)} %, on this text and window: streams if {STREAM}"
        f" need at most {STREAMS:.0%} of the keys and no more than random ones; diffuse if random"
        f" keys are at most {DIFFUSE:g} times those of the best rule, so that choosing saves"
        " little; else retrieves: it needs chosen keys.",
        scale="words",
        first=16,
        short="kind",
        words=tuple(KINDS),
        meanings=tuple(KINDS.values()),
    ),
    Column(
        "kind_reason",
        "word",
        "why this kind",
        "What the three rules that tell the kind of a head need.",
    ),
)
RULE_KEYS = Column(
    "rule_keys",
    "float",
    "keys under keep rules",
    "Keys of the cache that the judged queries of the keep rules see, on average: what kept keys"
    " are out of.",
    scale="log",
)


def _reached(epsilon: float) -> tuple[Column, ...]:
    error = f"{percent(epsilon)} %"
    return (
        Column(
            at_error("best_rule", epsilon),
            "word",
            f"best rule, {error}",
            f"Keep rule that reaches a relative error of {error} with the fewest keys, the floor"
            " left out; none: no rule does. The least of several numbers measured on the same"
            " queries: on others it is a little more.",
        ),
        Column(
            at_error("best_kept", epsilon),
            "float",
            f"keys of the best rule, {error}",
            f"Keys that the best rule for {error} keeps, on average over the queries.",
            scale="log",
            short=f"best {error}",
        ),
        Column(
            at_error("cache_rule", epsilon),
            "word",
            f"best rule for a cache, {error}",
            "The same among rules that drop keys for good: no query chooses by its own scores"
            f" ({error}).",
            short=f"cache rule {error}",
        ),
        Column(
            at_error("cache_kept", epsilon),
            "float",
            f"keys of the cache, {error}",
            f"Keys that the best rule for a cache keeps at {error}: the least over the rules, on"
            " the queries that they are compared by.",
            scale="log",
            first=17,
            short=f"cache {error}",
        ),
        Column(
            at_error("floor_kept", epsilon),
            "float",
            f"keys of the floor, {error}",
            f"Keys that chances of least error (Neyman) keep on average for {error}: about the"
            " fewest of any rule.",
            scale="log",
            short=f"floor {error}",
        ),
    )


FRONTIER = (
    LAYER,
    HEAD,
    KV_HEAD,
    Column("rule", "word", "keep rule", "Which keys are kept, as esscher.keep writes it."),
    Column("share", "float", "share", "Share of the cache's keys that the rule was given.", "log"),
    Column(
        "kept",
        "float",
        "keys kept",
        "Keys of the cache that are kept, on average over the queries of the key-value head.",
        "log",
    ),
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
        "Relative error if the judged queries themselves had chosen the keys: no cache can, it is"
        " cut before they come. The same as the relative error where a rule looks at no queries, or"
        " at each by itself.",
        "log",
    ),
    Column(
        "queries_choosing",
        "int",
        "queries that chose",
        "Positions of a window whose queries chose the keys for all, other ones than those that are"
        " judged; 0 where the rule looks at no queries, or at each judged one itself, which takes"
        " all keys.",
    ),
    Column(
        "queries",
        "int",
        "queries judged",
        "Number of queries that the error is the mean over: of a causal model they come after the"
        " cache was cut.",
    ),
    ACCURACY,
)


# ---- How much the model's next tokens feel the output of a head.


@dataclass(frozen=True)
class Felt:
    """Root mean square gradients, one of each window (w,) in which keep rules are compared."""

    gradients: Tensor


class Gradient(Statistic):
    """What a head's errors count in a split of keys between heads
    (esscher.probe.budget).
    """

    name = "gradient"
    state = Felt

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        if not spec.compared:
            return ()
        help_text = (
            "Root mean square gradient of the log probability of next tokens, drawn from the model,"
            " at the head's output: what its errors count in the best split."
        )
        return (Column("gradient", "float", "gradient of log p", help_text, scale="log"),)

    def init(self, start: Start) -> Felt:
        return Felt(torch.zeros(0, dtype=torch.float64))

    def update(self, state: Felt, block: Block) -> Felt:
        return (
            state
            if block.gradient is None
            else Felt(torch.tensor([block.gradient], dtype=torch.float64))
        )

    def merge(self, a: Felt, b: Felt) -> Felt:
        return a

    def stack(self, states: Sequence[Felt], order: Order) -> Felt:
        """A number of a window, not of its queries."""
        return Felt(torch.cat([state.gradients for state in states]))

    def finish(self, state: Felt, found: Found) -> Findings:
        if not found.spec.compared:
            return Findings()
        known = state.gradients
        return Findings(
            {"gradient": float(known.square().mean().sqrt()) if len(known) else math.nan}
        )
