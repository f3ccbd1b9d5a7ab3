"""What is asked of a probe against what its text and its model can give, without weights."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from esscher.corpus.documents import files_of_text
from esscher.hf.checkpoint import files_of_model
from esscher.hf.loading import Loaded
from esscher.probe.moments import moment_ladder
from esscher.probe.own_context import FEWEST
from esscher.probe.rules import check_rules
from esscher.probe.session import OBJECT, Mode, ProbeContext, make_context
from esscher.probe.spec import ProbeSpec, check_ladder
from esscher.probe.statistics.dispersion import check_spread
from esscher.probe.statistics.shape import check_scales


def check_asked(context: ProbeContext) -> None:
    """Refuse what this text and this model cannot give: too short a text, numbers of keys, rules
    and scales that do not fit.
    """
    spec, own = context.spec, context.mode is Mode.OWN
    most = (
        max(int(context.foreseen(layer).max()) for layer in context.layers) if own else context.keys
    )
    if own and most < FEWEST:
        raise ValueError(
            f"text: no query sees {FEWEST} keys, {most} at most, so nothing can be measured; give"
            " a longer text, or longer windows (--window)"
        )
    check_ladder(spec, most)
    if spec.moments:
        _check_moments(context)
    check_rules(spec, context.cache_keys if own else context.keys)
    check_spread(context)
    check_scales(context)


def _check_moments(context: ProbeContext) -> None:
    """Refuse moments of what is no pool of the whole corpus, and of more tokens than it has."""
    if context.mode is Mode.OWN:
        raise ValueError(
            "moments: they are of tokens of the whole corpus; use --pool corpus, or leave"
            " --moments out"
        )
    moment_ladder(context.spec.moments_n, context.keys)


# ---- What a process remembers of probes: the context of the spec it works on, so that a unit of
# work need not read it again.

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
