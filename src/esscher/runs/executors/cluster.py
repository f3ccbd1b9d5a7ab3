"""Units on a dask.distributed cluster: workers compute, shards come back as bytes, this process
stores them.

So the workers need not share a file system with the run. A worker that dies is the scheduler's to
replace: it gives the unit to another.
"""

from __future__ import annotations

import itertools
import queue
import secrets
from typing import Any

from esscher.runs.errors import RunError
from esscher.runs.executors.base import Executor
from esscher.runs.executors.order import Order, Outcome, compute_there, describe
from esscher.runs.provenance import versions
from esscher.runs.spec import Unit

__all__ = ["Cluster"]

_CONNECT_SECONDS = 10


class Cluster(Executor):
    """An existing cluster by its scheduler's address, "tcp://host:port", or "local" for one on this
    machine.
    """

    def __init__(self, order: Order, address: str, workers: int = 1) -> None:
        distributed = _distributed()
        self._order = order.as_json()
        self._address = address
        self._local: Any = None
        if address == "local":
            self._local = distributed.LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None
            )
        try:
            self._client = distributed.Client(
                self._local or address, timeout=_CONNECT_SECONDS, set_as_default=False
            )
        except (OSError, ValueError) as cause:
            raise RunError(
                f"no Dask scheduler answers at {address} ({cause}); expected tcp://host:port, or"
                " 'local'"
            ) from cause
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._futures: dict[str, Any] = {}
        # a key is known to the whole cluster, so no other run may have it
        self._token = f"esscher-{secrets.token_hex(8)}"
        self._tries = itertools.count()

    def submit(self, index: int, unit: Unit) -> None:
        key = f"{self._token}-{index}-{next(self._tries)}"
        future = self._client.submit(
            compute_there, self._order, index, unit, versions(), key=key, pure=False
        )
        self._futures[key] = future
        future.add_done_callback(lambda finished: self._done.put((index, finished)))

    def next(self) -> Outcome | None:
        try:
            index, future = self._done.get(timeout=1.0)
        except queue.Empty:
            return None
        try:
            return Outcome(index, data=future.result())
        except Exception as cause:
            if future.status in ("cancelled", "lost"):
                raise RunError(
                    f"the Dask scheduler at {self._address} is gone: {describe(cause)[0]}"
                ) from cause
            return Outcome(index, *describe(cause))
        finally:
            self._futures.pop(future.key, None)

    def close(self) -> None:
        self._client.cancel(list(self._futures.values()), force=True)
        self._client.close()
        if self._local is not None:
            self._local.close()


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as cause:
        raise RunError(
            f"Dask is not installed ({cause}); install it with: pip install 'esscher[dask]'"
        ) from cause
    return distributed
