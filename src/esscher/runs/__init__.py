"""Runs that survive and spread: units of work, in one process, in many or on a Dask cluster, stored as they finish."""

from esscher.runs.engine import execute, resume
from esscher.runs.errors import Damaged, RunError, RunIncomplete, RunInterrupted, RunLocked, StoreError
from esscher.runs.export import export_run
from esscher.runs.job import JOBS, Job, find_job, read_spec, register
from esscher.runs.manifest import Failure, Manifest
from esscher.runs.progress import Progress, terminal
from esscher.runs.run import Run, list_runs, load_run
from esscher.runs.spec import RunSpec, Unit
from esscher.runs.tables import Shard, concatenate

__all__ = [
    "JOBS",
    "Damaged",
    "Failure",
    "Job",
    "Manifest",
    "Progress",
    "Run",
    "RunError",
    "RunIncomplete",
    "RunInterrupted",
    "RunLocked",
    "RunSpec",
    "Shard",
    "StoreError",
    "Unit",
    "concatenate",
    "execute",
    "export_run",
    "find_job",
    "list_runs",
    "load_run",
    "read_spec",
    "register",
    "resume",
    "terminal",
]
