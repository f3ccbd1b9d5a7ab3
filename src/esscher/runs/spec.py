"""Specs and jobs: what a run computes, as plain data, and the code behind the name of its job."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from esscher.runs.errors import field_lines

if TYPE_CHECKING:
    from esscher.runs.columns import Declared
    from esscher.runs.tables import Shard

_S = TypeVar("_S", bound="RunSpec")
MOST_THREADS = 1024
Seed = Annotated[int, Field(ge=0, lt=2**63, description="seed of everything random")]
Unit = dict[str, Any]  # names one piece of work; whatever JSON can hold


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, shortest floats that read back, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: Any) -> str:
    """sha256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


class Plain(BaseModel):
    """A part of a spec: frozen, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSpec(Plain):
    """Base of every job's spec. A subclass fixes ``job`` by a Literal and adds fields (tuples, not
    lists).

    Everything that can change a bit of the result belongs here, ``threads`` included: the order of
    a parallel sum depends on it.
    """

    model_config = ConfigDict(validate_default=True)

    job: str
    seed: Seed = 0
    device: str = Field(default="cpu", description="device, e.g. cpu or cuda:0")
    dtype: str = Field(default="float64", description="floating-point type of the computation")
    threads: int = Field(default=1, ge=1, le=MOST_THREADS, description="threads of each process")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, defaults included."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """sha256 of the canonical JSON of all fields: the identity of the run."""
        return digest(self.as_dict())

    def unit_seed(self, unit: Unit) -> int:
        """A seed for one unit; it depends on the spec's seed and the unit alone."""
        return int(digest([self.seed, unit])[:15], 16)

    @classmethod
    def read(cls: type[_S], source: str | Path | Mapping[str, Any], **changes: Any) -> _S:
        """The spec from a YAML file or a mapping; ``changes`` (flags) replace fields. Bad input is
        a ValueError.
        """
        origin = f"{source}: " if isinstance(source, str | Path) else ""
        fields = {**read_mapping(source), **changes}
        for name, value in fields.items():
            try:
                canonical_json(value)
            except (TypeError, ValueError) as cause:
                raise ValueError(
                    f"{origin}{name}: expected finite numbers, strings or lists, got {value!r}"
                ) from cause
        try:
            return cls.model_validate_json(canonical_json(fields))
        except ValidationError as cause:
            raise ValueError(f"{origin}{field_lines(cause)}") from cause


def read_mapping(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a YAML file; a mapping is copied. Bad input is a ValueError of one line."""
    if isinstance(source, Mapping):
        return dict(source)
    try:
        fields = yaml.safe_load(Path(source).read_text("utf-8"))
    except OSError as cause:
        raise ValueError(
            f"{source}: cannot be read: {cause.strerror}; give a YAML file or flags"
        ) from cause
    except (yaml.YAMLError, ValueError) as cause:
        raise ValueError(f"{source}: not YAML: {' '.join(str(cause).split())}") from cause
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ValueError(f"{source}: expected 'name: value' lines, got {type(fields).__name__}")
    return fields


# ---- Jobs

JOBS: dict[str, str] = {}
"""Name of a job -> "module:attribute". Only :func:`register` fills it; no file of a run can."""


def _concatenate(context: Any, shards: Sequence[Shard]) -> Mapping[str, Any]:
    from esscher.runs.tables import concatenate  # naming a job must not import pyarrow

    return concatenate(context, shards)


@dataclass(frozen=True)
class Job:
    """A spec class and the functions that run it.

    ``check`` refuses a spec in the process that starts the run. ``open`` makes its context, once in
    each process: the spec itself, or an object with the spec in its field ``spec``, which may fill
    in what was left open. The others get the context. ``units`` lists the pieces of work, the same
    for the same spec. ``compute`` does one and returns tables by name. ``consolidate`` makes the
    final tables; the default concatenates rows. ``hashes`` names what else decides the result;
    it is compared on resuming. ``cost`` weighs a unit for the time left. ``columns`` describes the
    columns by table, from the spec alone. The module imports what computes at its top: threads are
    set before a unit begins.
    """

    name: str
    spec: type[RunSpec]
    units: Callable[[Any], Iterable[Unit]]
    compute: Callable[[Any, Unit], Mapping[str, Any]]
    consolidate: Callable[[Any, Sequence[Shard]], Mapping[str, Any]] = _concatenate
    hashes: Callable[[Any], Mapping[str, str]] = lambda spec: {}
    columns: Callable[[Any], Declared] = lambda spec: {}
    open: Callable[[Any], Any] = lambda spec: spec
    cost: Callable[[Any, Unit], float] = lambda context, unit: 1.0
    check: Callable[[Any], None] = lambda spec: None


def register(name: str, entry: str) -> None:
    """Let runs name a job: ``entry`` is "module:attribute" of a :class:`Job`, imported when it is
    first needed.
    """
    if entry.count(":") != 1:
        raise ValueError(f"entry: expected 'module:attribute', got {entry!r}")
    if JOBS.setdefault(name, entry) != entry:
        raise ValueError(f"job {name}: already registered as {JOBS[name]}, got {entry}")


def find_job(name: str, entry: str | None = None) -> Job:
    """The job registered under a name; ``entry`` as the process that started this one has it."""
    if entry is None and name not in JOBS:
        known = ", ".join(sorted(JOBS)) or "none"
        raise ValueError(
            f"job {name!r}: not registered (registered: {known}); import the module that registers"
            " it, or call esscher.runs.register(name, 'module:attribute')"
        )
    entry = JOBS[name] if entry is None else entry
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


def spec_of(context: Any) -> RunSpec:
    """The spec of what a job opened."""
    found: RunSpec = context if isinstance(context, RunSpec) else context.spec
    return found


def units_of(job: Job, context: Any) -> list[Unit]:
    """The units of a run, at least one, distinct, and as JSON gives them back to any process."""
    units = list(job.units(context))
    if not units:
        raise ValueError(f"job {job.name}: this spec leaves no unit of work")
    try:
        texts = [canonical_json(unit) for unit in units]
    except (TypeError, ValueError) as cause:
        raise ValueError(f"job {job.name}: a unit holds what JSON cannot: {cause}") from cause
    if len(set(texts)) < len(texts):
        raise ValueError(f"job {job.name}: two units are the same")
    return [json.loads(text) for text in texts]
