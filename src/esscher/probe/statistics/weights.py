"""How the softmax weights of a head are spread: their tail, sinks, and the critical scale."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

from esscher.errors import grid as deposit
from esscher.errors.grid import Deposit
from esscher.hf.call import AttentionCall
from esscher.probe.curves import AllKeys, add_keys
from esscher.probe.session import FEWEST
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import HEAD, LAYER, Head, HeadEnd, HeadView, Numbers, Result, Statistic
from esscher.runs.columns import Column, with_ends
from esscher.tails import scores as tails
from esscher.tails.scores import (
    SCORES,
    TopScores,
    critical_scale,
    gap_counts,
    gaps_from_masses,
    tail_length,
)

SHAPE = "Shape of the weights' tail: below 0.5 averages behave, above 0.7 a few keys decide."
TAIL = (
    *with_ends(Column("khat", "float", "k-hat", SHAPE, "linear", first=13)),
    Column("khat_label", "word", "tail", "good, bad or very bad, by k-hat."),
)

GAPS = 2.0 ** np.arange(-4, 7)  # from the largest score, at which keys are counted
# deposits without values (all keys: too wide for them), and the largest scores
Scores = tuple[Deposit | AllKeys, TopScores]


class Tail(Statistic):
    """Of the kept queries: Pareto k-hat of the weights and the critical scale of the scores."""

    name = "tail"
    state = (TopScores,)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (CRITICAL, *TAIL)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"gaps": GAP_COLUMNS}

    def init(self, head: HeadView) -> Scores:
        m, keep = len(head.kept), max(FEWEST, tail_length(head.most_keys) + 1)
        top = tails.init(m, keep, device=head.values.device)
        return deposit.init(m, SCORES, head.center[:0]), top

    def update(self, state: Scores, head: HeadView) -> Scores:
        if not len(head.kept):
            return state
        masses, top = state
        masses = add_keys(masses, head, lambda view: (view.kept_scores, view.values[:, :0]))
        return masses, tails.update(top, head.kept_scores)

    def merge(self, a: Scores, b: Scores) -> Scores:
        assert isinstance(a[0], Deposit)
        assert isinstance(b[0], Deposit)
        return deposit.merge(a[0], b[0]), tails.merge(a[1], b[1])

    def reduce(self, state: Scores, head: Head) -> Numbers:
        masses, top = state
        missing = top.keep - top.scores.shape[1]
        found = {"top": pad(top.scores, (0, missing), value=-math.inf), "count": top.count}
        if not len(top.count):
            return found
        if isinstance(masses, Deposit):
            known = max(FEWEST, tail_length(head.most_keys))
            gaps = [gaps_from_masses(masses, top.scores[:, :known])]
        else:
            gaps = [gap_counts(row[row > -torch.inf][None]) for row in masses.scores]
        return found | {
            "critical": torch.cat([critical_scale(*part) for part in gaps]).cpu(),
            "within": torch.cat([_within(*part) for part in gaps]).cpu(),
        }

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        top = found["top"]
        seen = torch.isfinite(top).any(0)
        tail = tails.finish(TopScores(top.shape[1], found["count"], top[:, seen]))
        low, high = tail.interval
        row = {"khat": tail.median, "khat_low": low, "khat_high": high, "khat_label": tail.label}
        row |= {"critical_scale": float(np.median(found["critical"]))}
        keys = found["within"].log().mean(0).exp().numpy()  # geometric mean over queries
        return Result(row, {"gaps": pd.DataFrame({"gap": GAPS, "keys": keys})})


def _within(gaps: Tensor, counts: Tensor) -> Tensor:
    """Keys within GAPS of each query's largest score, (m, len GAPS)."""
    at = torch.from_numpy(GAPS).to(gaps).expand(len(gaps), -1).contiguous()
    return counts.gather(1, torch.searchsorted(gaps, at, right=True) - 1)


class Sinks(Statistic):
    """The weight that queries put on the first and the special tokens of their own window, and on
    a sink logit.
    """

    name = "sinks"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        what = "Share of the attention that goes to first and special tokens."
        return (Column("sink_mass", "float", "sink mass", what, "linear", first=14, short="sinks"),)

    def in_window(self, call: AttentionCall, resting: Tensor) -> Numbers:
        weights, every = call.weights()[0], torch.arange(call.query.shape[2])
        mass = (weights * resting.to(weights.device)).sum(-1)
        if call.sinks is not None:
            mass = mass + (1 - weights.sum(-1)).clamp_min(0)
        seen = call.visible(every.to(weights.device))[0].sum(-1)
        return {"mass": mass, "seen": seen.expand(call.heads, -1)}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        used = found["mass"]
        if end.spec.pool == "sequence":
            used = used[found["seen"] >= FEWEST]
        return Result({"sink_mass": float(used.double().mean())}, {})


# ---- columns

CRITICAL = Column(
    "critical_scale",
    "float",
    "critical scale",
    "Factor on the scores at which the softmax over all keys freezes on the largest, median over"
    " queries: sup over gaps t of log N(t) / t, N(t) the keys within t of the largest score. Below"
    " 1 it is frozen as it is.",
    scale="log",
    short="critical",
)
GAP_COLUMNS = (
    LAYER,
    HEAD,
    Column("gap", "float", "gap", "Gap from a query's largest score.", "log"),
    Column("keys", "float", "keys", "Keys within that gap, geometric mean over queries.", "log"),
)
