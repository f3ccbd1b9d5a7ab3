"""Where a run is computed, as flags say it."""

from __future__ import annotations

from pydantic import Field

from esscher.runs.spec import Plain

__all__ = ["Executed"]

MOST_WORKERS = 1024


class Executed(Plain):
    """Arguments of :func:`esscher.runs.execute`."""

    workers: int = Field(
        default=1, ge=1, lt=MOST_WORKERS + 1, description="local processes; 1 is this one"
    )
    dask: str | None = Field(
        default=None,
        description="scheduler of a Dask cluster, tcp://host:8786; or local for one of --workers",
    )
