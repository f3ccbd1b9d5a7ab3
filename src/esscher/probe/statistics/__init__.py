"""The list of statistics of a probe; docs/developer/new_statistic.md shows how to add one."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TypeVar

from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import Statistic
from esscher.probe.statistics.errors import Draws, Regime, Scales, Theory
from esscher.probe.statistics.frontier import Frontier
from esscher.probe.statistics.more_text import MoreText
from esscher.probe.statistics.weights import Sinks, Tail

_S = TypeVar("_S", bound=Statistic)

# In the order of the columns; a statistic may read the columns of those before it.
STATISTICS: tuple[Statistic, ...] = (
    Theory(),
    Draws(),
    MoreText(),
    Tail(),
    Sinks(),
    Regime(),
    Frontier(),
    Scales(),
)

REGISTERED: dict[str, type[Statistic]] = {}
"""Statistics from elsewhere by "module:Class". Only :func:`register` fills it; no file of a run
can.
"""
OUTSIDE = "esscher.statistics"  # entry points of installed packages


def register(statistic: type[_S]) -> type[_S]:
    """Decorator: let probes name a statistic from outside this package,
    ``statistics=["module:Class"]``.
    """
    REGISTERED[f"{statistic.__module__}:{statistic.__name__}"] = statistic
    return statistic


def statistics_of(spec: ProbeSpec) -> tuple[Statistic, ...]:
    """The statistics of a probe: those of this package and those that the spec names."""
    return (*STATISTICS, *(_find(entry)() for entry in spec.statistics))


def check_registered(spec: ProbeSpec) -> None:
    """Refuse names that only the file of a run has: a process imports what a spec names after this
    alone.
    """
    known = {*REGISTERED, *(point.value for point in entry_points(group=OUTSIDE))}
    for entry in spec.statistics:
        if entry not in known:
            raise ValueError(
                f"statistics: {entry} is not registered (registered:"
                f" {', '.join(sorted(known)) or 'none'}); import the module that registers it, or"
                f" list it among the entry points {OUTSIDE}"
            )


def _find(entry: str) -> type[Statistic]:
    """The class of an entry; a worker imports its module, since whoever started it has checked the
    name.
    """
    if entry not in REGISTERED:
        module, _, name = entry.partition(":")
        register(getattr(importlib.import_module(module), name))
    return REGISTERED[entry]
