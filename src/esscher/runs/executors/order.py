"""One unit of work, from a spec and a unit to the bytes of its shard: the same function in every
process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from esscher.runs.columns import declare
from esscher.runs.job import Job, load_job
from esscher.runs.provenance import versions
from esscher.runs.spec import RunSpec, Unit, canonical_json
from esscher.runs.tables import as_tables, encode_shard

__all__ = ["Order", "Outcome", "compute_shard", "compute_there", "describe", "threads_set"]


@dataclass(frozen=True)
class Order:
    """What any process needs to do units of a run; plain text, so it travels."""

    entry: str  # "module:attribute" of the job
    header: dict[str, Any]  # of the manifest; holds the job's name and the spec

    def as_json(self) -> str:
        return canonical_json({"entry": self.entry, "header": self.header})

    @classmethod
    def from_json(cls, text: str) -> Order:
        return cls(**json.loads(text))

    def load(self) -> tuple[Job, RunSpec]:
        job = load_job(self.entry, self.header["job"])
        return job, job.spec.read(self.header["spec"])


@dataclass(frozen=True)
class Outcome:
    """What became of one try of a unit. ``data``: its shard, unless the executor's worker has
    stored it already.
    """

    index: int
    reason: str | None = None  # why it failed
    traceback: str = ""
    data: bytes | None = None


def compute_shard(job: Job, spec: RunSpec, header: dict[str, Any], index: int, unit: Unit) -> bytes:
    with threads_set(spec.threads):
        tables = job.compute(spec, unit)
    return encode_shard(
        declare(as_tables(tables), job.columns(spec)), {**header, "index": index, "unit": unit}
    )


def compute_there(order: str, index: int, unit: Unit, expected: dict[str, str]) -> bytes:
    """The same in a process of another machine, if it has the same versions: others could give
    other bits.
    """
    here = versions()
    other = [name for name in expected if here.get(name) != expected[name]]
    if other:
        found = ", ".join(f"{name} {here.get(name)} instead of {expected[name]}" for name in other)
        raise RuntimeError(f"the worker has {found}; give it the versions of the client")
    job, spec, header = _loaded(order)
    return compute_shard(job, spec, header, index, unit)


@functools.lru_cache(maxsize=8)
def _loaded(order: str) -> tuple[Job, RunSpec, dict[str, Any]]:
    parsed = Order.from_json(order)
    return *parsed.load(), parsed.header


def describe(cause: BaseException) -> tuple[str, str]:
    """An exception as one line, and its traceback."""
    text = " ".join(str(cause).split())
    reason = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    return reason[:500], "".join(traceback.format_exception(cause))[-4000:]


@contextlib.contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """Let torch, where it is loaded, use so many threads: the bits of a parallel sum depend on the
    number.

    numpy's BLAS and numba read theirs when they are imported (OMP_NUM_THREADS, NUMBA_NUM_THREADS);
    local workers are started with both set.
    """
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else threads
    if torch and before != threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch and before != threads:
            torch.set_num_threads(before)
