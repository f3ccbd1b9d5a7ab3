"""Three domains of text that need no download: manual pages, source code, licences of what is
installed.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

__all__ = ["packaged_documents"]

LICENCE = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)
NOT_CODE = {"pydoc_data"}  # the prose
TESTS = {"test", "tests", "idle_test"}


def packaged_documents(domain: str) -> Iterator[str]:
    """``prose``: Python's manual by topic; ``code``: its standard library by file; ``legal``:
    licences by distribution.

    The order is that of the names. Prose and code are fixed by the version of Python, licences by
    what is installed.
    """
    return {"prose": _prose, "code": _code, "legal": _legal}[domain]()


def _prose() -> Iterator[str]:
    topics = pydoc_data.topics.topics
    return (topics[name] for name in sorted(topics))


def _code() -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    wanted = sys.stdlib_module_names - NOT_CODE
    # not what else was installed beside them
    tops = [path for path in folder.iterdir() if path.stem in wanted]
    paths = [path for path in tops if path.suffix == ".py"]
    paths += [path for top in tops if top.is_dir() for path in top.rglob("*.py")]
    chosen = [path for path in paths if not TESTS & set(path.relative_to(folder).parts)]
    for path in sorted(chosen, key=lambda path: path.relative_to(folder).parts):
        with tokenize.open(path) as source:  # honours the coding line
            yield source.read()
    if not chosen:
        raise ValueError(
            "packaged code: this Python has no source of its standard library; give files with"
            " --text"
        )


def _legal() -> Iterator[str]:
    seen: set[bytes] = set()
    by_name: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a broken installation may have none
            by_name.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
    for name in sorted(by_name):
        licences = [file for file in by_name[name].files or () if _is_licence(file)]
        for file in sorted(licences, key=str):
            path = Path(str(by_name[name].locate_file(file)))
            if not path.is_file():
                continue
            text = _licence_text(path.read_bytes())
            key = hashlib.sha256(" ".join(text.split()).encode("utf-8")).digest()
            if key not in seen:
                seen.add(key)
                yield text
    if not seen:
        raise ValueError(
            "packaged legal: no installed distribution has a licence file; give files with --text"
        )


def _is_licence(file: PurePosixPath) -> bool:
    """In the distribution's own metadata, so that no source file of that name is taken."""
    inside = any(part.endswith((".dist-info", ".egg-info")) for part in file.parts[:-1])
    return inside and (LICENCE.search(file.name) is not None or "licenses" in file.parts[:-1])


def _licence_text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
