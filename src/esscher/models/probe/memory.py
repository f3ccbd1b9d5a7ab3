"""What a process remembers of probes: the context of the spec it works on, so that a unit of work
need not read it again.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from esscher.models.corpus.documents import files_of_text
from esscher.models.huggingface.checkpoint import files_of_model
from esscher.models.huggingface.loading import Loaded
from esscher.models.probe.asked import check_asked
from esscher.models.probe.context import OBJECT, ProbeContext, make_context
from esscher.models.probe.spec import ProbeSpec

__all__ = ["Stamp", "context_of", "stamp"]

Stamp = tuple[tuple[str | int, ...], ...]

_lock = threading.Lock()  # a worker of Dask may do units in threads
# and for which spec; one only: a model and its tokens fill the memory
_latest: tuple[ProbeContext, Stamp, str] | None = None


def context_of(
    spec: ProbeSpec, *, loaded: Loaded | None = None, starts: bool = False
) -> ProbeContext:
    """The context of a spec: the one this process has, or a new one in its place. Its own spec
    leaves nothing open.

    ``starts``: a run starts here, and files may have changed since under the same names; units of
    one run all work on what it started with. ``loaded``: the model of a new context, where it was
    given as an object.
    """
    global _latest
    with _lock:
        same = (
            loaded is None
            and _latest is not None
            and spec.hash in (_latest[0].spec.hash, _latest[2])
        )
        if not same or (starts and _latest is not None and _latest[1] != stamp(spec)):
            _latest = None  # not two of them in memory
            # before reading: what changes meanwhile is read again the next time
            before = stamp(spec)
            _latest = make_context(spec, loaded, check_asked), before, spec.hash
        assert _latest is not None
        return _latest[0]


def stamp(spec: Any) -> Stamp:
    """Which files a spec names by model and corpus, and which versions of them; what a hub holds is
    known by its copy here.
    """
    model = [] if spec.model.startswith(OBJECT) else files_of_model(spec.model, spec.revision)
    return tuple(_version(path) for path in [*model, *files_of_text(spec.corpus)])


def _version(path: Path) -> tuple[str | int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return (str(path),)
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
