"""What is measured of a head: a list of statistics, one file each; docs/developer/new_statistic.md
shows how to add one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TypeVar

from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics.base import (
    Accuracy,
    Identity,
    Statistic,
)
from esscher.probe.statistics.dispersion import Dispersion
from esscher.probe.statistics.endless import EndlessText
from esscher.probe.statistics.errors import (
    Bernoulli,
    OutputMoments,
    OwnOutput,
    Replacement,
    Softmax,
)
from esscher.probe.statistics.frontier import Frontier, Gradient
from esscher.probe.statistics.shape import (
    Regime,
    Scales,
    ScoreShape,
    Sinks,
    Tail,
    Theory,
    TokenShape,
)
from esscher.runs.columns import Column

_S = TypeVar("_S", bound=Statistic)

# In the order of the columns; a statistic reads those before it.
STATISTICS: tuple[Statistic, ...] = (
    Identity(),
    Theory(),
    Replacement(),
    EndlessText(),
    Bernoulli(),
    Softmax(),
    Dispersion(),
    Tail(),
    Sinks(),
    ScoreShape(),
    TokenShape(),
    Regime(),
    Accuracy(),
    OwnOutput(),
    OutputMoments(),
    Frontier(),
    Gradient(),
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
    """The statistics of a probe, checked: those of this package and those that the spec names."""
    known = [*STATISTICS, *(_found(entry)() for entry in spec.statistics)]
    return checked([statistic.asked(spec) for statistic in known], spec)


def check_registered(spec: ProbeSpec) -> None:
    """Refuse names that only the file of a run has: a process imports what a spec names after this
    alone.
    """
    known = (
        {*REGISTERED, *(point.value for point in entry_points(group=OUTSIDE))}
        if spec.statistics
        else set()
    )
    for entry in spec.statistics:
        if entry not in known:
            raise ValueError(
                f"statistics: {entry} is not registered (registered:"
                f" {', '.join(sorted(known)) or 'none'}); import the module that registers it, or"
                f" list it among the entry points {OUTSIDE}"
            )


def _found(entry: str) -> type[Statistic]:
    """The class of an entry; a worker imports its module, since whoever started it has checked the
    name.
    """
    if entry not in REGISTERED:
        module, _, name = entry.partition(":")
        found = getattr(importlib.import_module(module), name, None)
        if not (isinstance(found, type) and issubclass(found, Statistic)):
            raise ValueError(f"statistics: {entry} is not a class of Statistic")
        register(found)
    return REGISTERED[entry]


def checked(statistics: Sequence[Statistic], spec: ProbeSpec) -> tuple[Statistic, ...]:
    """The same, if each has a name and columns of its own, reads only earlier ones, and tables are
    declared alike.
    """
    columns: dict[str, str] = {}
    tables: dict[str, tuple[Column, ...]] = {}
    names: list[str] = []
    for statistic in statistics:
        name = statistic.name
        if name in names:
            raise ValueError(f"statistic {name}: there are two of this name; rename one")
        late = [other for other in statistic.reads if other not in names]
        if late:
            raise ValueError(
                f"statistic {name}: it reads {late}, expected some of those before it, {names}"
            )
        for column in statistic.columns(spec):
            if column.key in columns:
                raise ValueError(
                    f"statistic {name}: column {column.key} is {columns[column.key]}'s already;"
                    " rename it"
                )
            columns[column.key] = name
        for table, declared in statistic.tables(spec).items():
            if tables.setdefault(table, declared) != declared:
                raise ValueError(
                    f"statistic {name}: table {table} is declared with other columns already; use"
                    " another name"
                )
        names.append(name)
    return tuple(statistics)
