"""What the numbers of a head do as more text is read, in words for someone who has not seen the
theory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from esscher.convergence.endless import BEYOND, SETTLED

__all__ = ["settled_sentence"]

NEEDED, EXPONENT, EFFECTIVE, ERROR = (
    "tokens_needed_10pct",
    "beta_fit",
    "effective_1024",
    "relative_1024",
)


def settled_sentence(rows: pd.DataFrame, status: str, keys: int, *, own: bool) -> str:
    """``rows``: the table ``endless`` of a head. ``own``: each query has a context of its own, of
    ``keys`` keys on average.
    """
    known = {str(row["number"]): row for row in rows.to_dict("records")}
    if own:
        return _own_context(known)
    if status == SETTLED:
        parts = [_exponent(known[EXPONENT]), _needed_between(known[NEEDED])]
        return (
            "Settled: more text of this kind would change these numbers little. An endless one has"
            f" {_joined(parts)}."
        )
    for key in (NEEDED, ERROR, EXPONENT, EFFECTIVE):
        row = known[key]
        if row["status"] == status and math.isfinite(row["value"]) and _known(row):
            return _unsettled(key, row, status, keys)
    return (
        f"Beyond the pool: a few of these {keys:,} tokens decide what the head gives, and more text"
        " may bring others that do; its numbers are those of this text alone."
    )


def _unsettled(key: str, row: Mapping[str, Any], status: str, keys: int) -> str:
    """What the number was on halves of the text, what it is, and what to expect."""
    say = {NEEDED: _tokens, ERROR: _percent, EXPONENT: _plain, EFFECTIVE: _tokens}[key]
    what = {
        NEEDED: "An error of 10 % takes {value} randomly drawn tokens",
        ERROR: "1,024 randomly drawn tokens leave an error of {value}",
        EXPONENT: "The error falls with exponent {value}",
        EFFECTIVE: "Of 1,024 randomly drawn tokens {value} share the attention",
    }[key]
    now = what.format(value=say(row["value"]))
    half = f", {say(row['half'])} on halves of it" if math.isfinite(row["half"]) else ""
    if status != BEYOND:
        return (
            f"Moving: {now[0].lower()}{now[1:]} on this text of {keys:,} tokens{half}. The number"
            f" is not at rest yet: an endless text of this kind has {say(row['low'])} to"
            f" {say(row['high'])}."
        )
    bound = (
        f"at least {say(row['low'])}"
        if math.isfinite(row["low"])
        else f"at most {say(row['high'])}"
    )
    return (
        f"Beyond the pool: {now[0].lower()}{now[1:]} on this text of {keys:,} tokens{half}. That"
        f" belongs to this much text: an endless one of this kind has {bound}. Read more text"
        " (--max-tokens) to know."
    )


def _own_context(known: Mapping[str, Mapping[str, Any]]) -> str:
    parts = [_exponent(known[EXPONENT])]
    effective = known[EFFECTIVE]
    if _known(effective):
        parts.append(
            f"{_tokens(effective['low'])} to {_tokens(effective['high'])} effective tokens among"
            " 1,024"
        )
    parts = [part for part in parts if part]
    if not parts:
        return "One window of text cannot tell how much other windows differ."
    return (
        "Each query is measured in its own context; other windows of such text have"
        f" {_joined(parts)}."
    )


def _exponent(row: Mapping[str, Any]) -> str:
    return f"an exponent of {_plain(row['low'])} to {_plain(row['high'])}" if _both(row) else ""


def _needed_between(row: Mapping[str, Any]) -> str:
    return (
        f"{_tokens(row['low'])} to {_tokens(row['high'])} tokens for an error of 10 %"
        if _both(row)
        else ""
    )


def _both(row: Mapping[str, Any]) -> bool:
    return math.isfinite(row["low"]) and math.isfinite(row["high"])


def _known(row: Mapping[str, Any]) -> bool:
    return math.isfinite(row["low"]) or math.isfinite(row["high"])


def _joined(parts: list[str]) -> str:
    return " and ".join(part for part in parts if part) or "the same numbers"


def _tokens(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


def _plain(value: float) -> str:
    return f"{value:.2f}"
