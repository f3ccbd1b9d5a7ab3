"""Where a result comes from: versions, commit, machine."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["commit", "machine", "versions"]

# Those whose version can change a bit of a result or of a file.
_PACKAGES = ("esscher", "torch", "numpy", "scipy", "numba", "pandas", "pyarrow", "transformers")


@functools.cache
def versions() -> dict[str, str]:
    """Python and the packages that matter, as installed; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "pid": os.getpid(),
    }


@functools.cache
def commit() -> str | None:
    """The commit of this source, with -dirty if changed since; None where it is not known."""
    return _installed_commit() or _checked_out_commit()


def _installed_commit() -> str | None:
    """As pip wrote it down when it installed from a repository."""
    try:
        text = importlib.metadata.distribution("esscher").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    return str(found) if found else None


def _checked_out_commit() -> str | None:
    """As git says, if git keeps this very file: a virtual environment may lie in somebody else's
    repository.
    """
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
