"""Jobs: what a run does. A run names its job; the code behind the name comes from a table filled by
imports alone.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esscher.runs.spec import RunSpec, Unit, canonical_json, read_mapping

if TYPE_CHECKING:
    from esscher.runs.columns import Declared
    from esscher.runs.tables import Shard

MOST_UNITS = 1_000_000  # each is a file
JOBS: dict[str, str] = {}
"""Name of a job -> "module:attribute". Only :func:`register` fills it; no file of a run can."""


def _no_hashes(spec: Any) -> dict[str, str]:
    return {}


def _no_columns(spec: Any) -> Declared:
    return {}


def _alike(spec: Any, unit: Unit) -> float:
    return 1.0


def _as_it_is(spec: Any) -> Any:
    return spec


def _one_after_the_other(spec: Any, shards: Sequence[Shard]) -> Mapping[str, Any]:
    from esscher.runs.tables import concatenate  # to name a job takes no tables

    return concatenate(spec, shards)


@dataclass(frozen=True)
class Job:
    """A spec class and functions of a spec.

    ``units`` lists the pieces of work, plain dicts that JSON can hold; the same spec gives the same
    list. ``compute`` does one: tables by name (Arrow, pandas, a mapping of columns, or a list of
    rows), depending on spec and unit alone. ``consolidate`` makes the final tables of the shards,
    which come in the order of units; by default their rows, one unit after the other. ``hashes``
    names what is outside the spec and decides the result (a model's files, a corpus), computed once
    per start and compared on resuming. ``columns`` says what the columns of the tables are, by
    table (:class:`~esscher.runs.Column`); who shows them reads it from the stored run. ``cost``
    weighs a unit against the others, so that the time left is right where they differ. ``concrete``
    replaces what a new run's spec leaves open, where that is to be found out: the run has the
    answer. The module should import what computes at its top: threads are set before a unit begins.
    """

    name: str
    spec: type[RunSpec]
    units: Callable[[Any], Iterable[Unit]]
    compute: Callable[[Any, Unit], Mapping[str, Any]]
    consolidate: Callable[[Any, Sequence[Shard]], Mapping[str, Any]] = _one_after_the_other
    hashes: Callable[[Any], Mapping[str, str]] = _no_hashes
    columns: Callable[[Any], Declared] = _no_columns
    concrete: Callable[[Any], Any] = _as_it_is
    cost: Callable[[Any, Unit], float] = _alike


def register(name: str, entry: str) -> None:
    """Let runs name a job: ``entry`` is "module:attribute" of a :class:`Job`, imported when it is
    first needed.
    """
    module, colon, attribute = entry.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"entry: expected 'module:attribute', got {entry!r}")
    if JOBS.setdefault(name, entry) != entry:
        raise ValueError(f"job {name}: already registered as {JOBS[name]}, got {entry}")


def find_job(name: str) -> Job:
    """The job registered under a name."""
    return load_job(entry_of(name), name)


def entry_of(name: str) -> str:
    if name not in JOBS:
        known = ", ".join(sorted(JOBS)) or "none"
        raise ValueError(
            f"job {name!r}: not registered (registered: {known}); import the module that registers"
            " it, or call esscher.runs.register(name, 'module:attribute')"
        )
    return JOBS[name]


def load_job(entry: str, name: str) -> Job:
    """Import a job. Entries come from this process's table or from the process that started this
    one.
    """
    module, _, attribute = entry.partition(":")
    job = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(job, Job) or job.name != name:
        raise ValueError(f"job {name}: {entry} is not a Job of that name")
    return job


def read_spec(source: Any, **changes: Any) -> RunSpec:
    """A spec from a YAML file or a mapping, in the class of the job it names; ``changes`` (flags)
    replace fields.
    """
    fields = {**read_mapping(source), **changes}
    if not isinstance(fields.get("job"), str):
        raise ValueError(f"job: expected the name of a job, got {fields.get('job')!r}")
    return find_job(fields["job"]).spec.read(fields)


def units_of(job: Job, spec: RunSpec) -> list[Unit]:
    """The units of a run, checked: distinct, at least one, and as JSON gives them back to any
    process.
    """
    seen: dict[str, int] = {}
    for index, unit in enumerate(job.units(spec)):
        if index == MOST_UNITS:
            raise ValueError(
                f"job {job.name}: expected at most {MOST_UNITS} units of work, got more; ask for"
                " less"
            )
        try:
            text = canonical_json(unit)
        except (TypeError, ValueError) as cause:
            raise ValueError(
                f"job {job.name}: unit {index} holds what JSON cannot: {cause}"
            ) from cause
        if not isinstance(unit, dict):
            raise ValueError(f"job {job.name}: unit {index}: expected a dict, got {unit!r}")
        if text in seen:
            raise ValueError(f"job {job.name}: units {seen[text]} and {index} are the same: {text}")
        seen[text] = index
    if not seen:
        raise ValueError(f"job {job.name}: this spec leaves no unit of work")
    return [json.loads(text) for text in seen]
