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
    "query_stderr",
    "float",
    "standard error, queries",
    "The part of the standard error that comes of the choice of queries.",
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
CONSTANTS = (
    Column(
        "rate",
        "word",
        "rate",
        "Which rate a constant belongs to: 1/2, or the one proved for the moments.",
    ),
    Column(
        "constant",
        "float",
        "constant",
        "Largest n^exponent times the mean error, over the ladder of n.",
    ),
    Column("at", "int", "at n", "Token number where that is largest."),
    Column(
        "bound",
        "float",
        "proved constant",
        "Constant of the uniform error proved for this law, by chaining.",
        short="proved: law",
        status="proved",
    ),
    Column(
        "bound_any",
        "float",
        "proved constant, any law",
        "Constant of the uniform error proved for every law of this support, by chaining.",
        short="proved: any law",
        status="proved",
    ),
)
FORMS = {
    "power": ("power of R", "C grows like R to this"),
    "growth": ("growth", "C grows like exp of this times R"),
}
GROWTH = (
    Column(
        "of",
        "word",
        "constant of",
        "measured, or which proved constant: bound or bound_any.",
        short="of",
    ),
    Column(
        "form",
        "word",
        "form",
        "Which form leaves less of the constants unexplained: power or exponential.",
    ),
    *(Column(form, "float", label, f"{words}.") for form, (label, words) in FORMS.items()),
    *(
        Column(
            f"{form}_{end}",
            "float",
            f"{label}, {end}",
            f"{word} end of the interval: {words}.",
            short=end,
        )
        for form, (label, words) in FORMS.items()
        for end, word in (("low", "Lower"), ("high", "Upper"))
    ),
    *(
        Column(
            f"{form}_misfit",
            "float",
            f"{label}, misfit",
            f"Root mean square left of log C, where {words}.",
            short="misfit",
        )
        for form, (label, words) in FORMS.items()
    ),
    Column(
        "power_first",
        "float",
        "power, small R",
        "Power of R over the first half of the radii.",
        short="small R",
    ),
    Column(
        "power_last",
        "float",
        "power, large R",
        "Power of R over the last half of the radii.",
        short="large R",
    ),
)


def columns(spec: Any) -> Declared:
    return {
        "errors": (*POINT, *CURVE, *ERRORS),
        "curves": (*POINT, *CURVE, QUERY_STDERR),
        "rates": (*POINT, *CURVE, *HORIZONS, *RATE, *THEORY, *STATUS),
        "refusals": (*POINT, *STATUS),
        "constants": (*POINT, *CURVE, *RATE[:1], *CONSTANTS),
        "growth": (*CURVE, *CONSTANTS, *GROWTH),
    }
