"""Tails of the tokens that enter a layer: norms and coordinates, with and without the tokens that
attention rests on.

The first token of a window and special tokens are unlike the others: a few of their coordinates are
so large that they alone make a tail. States of them and of the text are kept apart, and merge to
that of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from esscher.runs.columns import Column
from esscher.tails import extremes
from esscher.tails.extremes import TAILS, Extremes, TailComparison, TokenTails

__all__ = ["TAIL_COLUMNS", "SplitExtremes", "SplitTails", "tail_row"]


@dataclass(frozen=True)
class SplitExtremes:
    """Streaming state of the tokens seen so far."""

    text: Extremes
    sinks: Extremes  # first tokens of windows and special ones

    @classmethod
    def of(cls, hidden: Tensor, sinks: Tensor) -> SplitExtremes:
        """``hidden`` (B, d); ``sinks`` (B,)."""
        start = extremes.init(hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
        if not bool(sinks.any()):
            return cls(extremes.update(start, hidden), start)
        return cls(extremes.update(start, hidden[~sinks]), extremes.update(start, hidden[sinks]))

    def merge(self, other: SplitExtremes) -> SplitExtremes:
        return SplitExtremes(
            extremes.merge(self.text, other.text), extremes.merge(self.sinks, other.sinks)
        )

    def finish(self) -> SplitTails:
        whole = extremes.finish(extremes.merge(self.text, self.sinks))
        apart = bool(self.sinks.count and self.text.count)
        return SplitTails(whole, extremes.finish(self.text) if apart else whole, self.sinks.count)


@dataclass(frozen=True)
class SplitTails:
    """Which law the tails follow; ``text``: without first and special tokens."""

    whole: TokenTails
    text: TokenTails
    sinks: int  # how many those are


KINDS = {"norm": "norms", "coordinate": "coordinates"}
MEANINGS = (
    "the tail of a Gaussian fits better than any Pareto law",
    "heavier than a Gaussian, yet with no power seen: like an exponential",
    "a Pareto law fits better, with a shape above 0",
    "neither fits better beyond the error of the comparison",
    "too few tokens, or too much alike",
)


def _words(kind: str, plural: str) -> tuple[Column, ...]:
    whole = (
        f"Law of the largest token {plural}, a Gaussian's tail against Pareto's, both fitted and"
        " compared."
    )
    text = f"Law of the largest {plural} without first tokens of windows and special tokens."
    return (
        Column(f"{kind}_tail", "word", f"tail of {plural}", whole, words=TAILS, meanings=MEANINGS),
        Column(
            f"{kind}_tail_text",
            "word",
            f"{plural} without sinks",
            text,
            words=TAILS,
            meanings=MEANINGS,
        ),
    )


def _numbers(kind: str, plural: str) -> tuple[Column, ...]:
    shape, ratio = f"{kind}_shape", f"{kind}_ratio"
    interval = "95 % interval, tokens taken as independent."
    return (
        Column(
            shape,
            "float",
            f"Pareto shape of {plural}",
            f"Shape xi of the generalised Pareto law of the largest {plural}; above 0 is a power"
            " tail, of exponent 1/xi.",
            ends=(f"{shape}_low", f"{shape}_high"),
        ),
        Column(f"{shape}_low", "float", f"shape of {plural}, low", f"Lower end of its {interval}"),
        Column(
            f"{shape}_high", "float", f"shape of {plural}, high", f"Upper end of its {interval}"
        ),
        Column(
            f"{kind}_sigma",
            "float",
            f"Gaussian scale of {plural}",
            f"Scale of the Gaussian whose tail fits the largest {plural} best, in standard"
            " deviations; 1 for a Gaussian law.",
        ),
        Column(
            ratio,
            "float",
            f"likelihood ratio of {plural}",
            "Log-likelihood of the Pareto law less that of the Gaussian tail, per value of the"
            " tail; above 0 for Pareto.",
            ends=(f"{ratio}_low", f"{ratio}_high"),
        ),
        Column(f"{ratio}_low", "float", f"ratio of {plural}, low", f"Lower end of its {interval}"),
        Column(
            f"{ratio}_high", "float", f"ratio of {plural}, high", f"Upper end of its {interval}"
        ),
    )


TAIL_COLUMNS = (
    *(column for kind, plural in KINDS.items() for column in _words(kind, plural)),
    *(column for kind, plural in KINDS.items() for column in _numbers(kind, plural)),
    Column(
        "tail_reason",
        "word",
        "tails in words",
        "The numbers behind the laws of the tails, and what differs from the verdict.",
    ),
)


def tail_row(tails: SplitTails | None, verdict: str) -> dict[str, Any]:
    """The columns of a layer; ``verdict``: that by kurtosis, which is named where it says
    otherwise.
    """
    if tails is None:
        words = {
            column.key: "unknown" if column.words else ""
            for column in TAIL_COLUMNS
            if column.kind == "word"
        }
        return {column.key: float("nan") for column in TAIL_COLUMNS} | words
    row: dict[str, Any] = {}
    told = []
    for kind, plural in KINDS.items():
        whole, text = getattr(tails.whole, plural), getattr(tails.text, plural)
        row |= _values(kind, whole) | {f"{kind}_tail_text": text.verdict}
        told.append(f"{plural.capitalize()}: {whole.reason}.")
        if text.verdict != whole.verdict:
            told.append(f"Without the {tails.sinks} first and special tokens, {text.reason}.")
    heavy = {tails.whole.norms.verdict, tails.whole.coordinates.verdict} & {"Pareto", "between"}
    if verdict == "heavier" and not heavy:
        told.append(
            "By kurtosis the verdict is heavier: it counts single coordinates and values, this one"
            " the tail of all."
        )
    if verdict in ("sub-Gaussian", "lighter") and heavy:
        told.append(
            f"By kurtosis the verdict is {verdict}: it weighs the middle of each coordinate, this"
            " one the largest values."
        )
    row["tail_reason"] = " ".join(told)
    return {column.key: row[column.key] for column in TAIL_COLUMNS}


def _values(kind: str, found: TailComparison) -> dict[str, Any]:
    (shape_low, shape_high), (ratio_low, ratio_high) = found.shape_interval, found.ratio_interval
    return {
        f"{kind}_tail": found.verdict,
        f"{kind}_shape": found.shape,
        f"{kind}_shape_low": shape_low,
        f"{kind}_shape_high": shape_high,
        f"{kind}_sigma": found.sigma,
        f"{kind}_ratio": found.ratio,
        f"{kind}_ratio_low": ratio_low,
        f"{kind}_ratio_high": ratio_high,
    }
