"""What the columns of a run of ``esscher converge`` are."""

from __future__ import annotations

from typing import Any

from esscher.convergence.columns import CURVE, HORIZONS, RATE, STATUS
from esscher.runs.columns import Column, Declared
from esscher.theory import bohbot

__all__ = ["columns"]

POINT = (
    Column("point", "int", "point", "Place in the sweep."),
    Column("value", "float", "value", "Value of what the sweep varies."),
)
ERRORS = (
    Column("repeat", "int", "repeat", "Number of the draw."),
    Column("squared", "float", "squared error", "Squared error of one draw."),
    Column("limit_squared", "float", "squared limit", "Squared size of the limit."),
)
QUERY_STDERR = Column(
    "query_stderr", "float", "standard error, queries", "The part of the standard error that comes of the choice of queries."
)
THEORY = (
    Column(
        "exact_exponent",
        "float",
        "exact exponent",
        "Exponent of the exact error over the same n.",
        short="exact",
        of="horizon2",
        status="exact",
    ),
    Column(
        "sharp",
        "float",
        "sharp exponent",
        "Heuristic exponent of random-energy type.",
        short="sharp (heuristic)",
        of="horizon2",
        status="heuristic",
        formula="sharp",
    ),
    Column(
        "bohbot_experimental",
        "float",
        "experimental exponent",
        "Exponent from an experiment that a summary of the paper suggests; not proved.",
        short=bohbot.EXPERIMENTAL,
        of="coupling",
        status="experimental",
        formula=bohbot.EXPERIMENTAL,
    ),
    Column(
        "bohbot",
        "float",
        "proved exponent",
        "Exponent proved for the moments.",
        short=bohbot.PROVED,
        of="coupling",
        status="proved",
        formula=bohbot.PROVED,
    ),
)


def columns(spec: Any) -> Declared:
    return {
        "errors": (*POINT, *CURVE, *ERRORS),
        "curves": (*POINT, *CURVE, QUERY_STDERR),
        "rates": (*POINT, *CURVE, *HORIZONS, *RATE, *THEORY, *STATUS),
        "refusals": (*POINT, *STATUS),
    }
