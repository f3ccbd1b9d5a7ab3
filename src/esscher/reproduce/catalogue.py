"""The claims there are: every module of ``reproduce/claims`` lists some; others are registered from
outside.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from esscher.reproduce import claims
from esscher.reproduce.claim import Claim

__all__ = ["all_claims", "check_known", "find_claim", "register"]

REGISTERED: dict[str, Claim] = {}
"""Claims from elsewhere by "module:NAME". Only :func:`register` fills it; no file of a run can."""


def register(entry: str) -> Claim:
    """Let runs name a claim from outside this package: ``entry`` is "module:NAME" of a
    :class:`Claim`.
    """
    found = _imported(entry)
    REGISTERED[entry] = found
    return found


def all_claims() -> dict[str, Claim]:
    """Every claim by its id, in the order of numbers; those from outside, by their entries,
    last.
    """
    return {**_own(), **REGISTERED}


def find_claim(name: str) -> Claim:
    """A claim by its id or number, or by the entry "module:NAME" of one from outside.

    A worker imports what an entry names, since whoever started it has checked the name
    (:func:`check_known`).
    """
    if ":" in name:
        return REGISTERED.get(name) or _imported(name)
    own = _own()
    found = own.get(name) or next(
        (claim for claim in own.values() if str(claim.number) == name), None
    )
    if found is None:
        raise ValueError(
            f"claim: expected one of {', '.join(own)}, its number, or module:NAME of your own, got"
            f" {name!r}"
        )
    return found


def check_known(name: str) -> None:
    """Refuse an entry that only the file of a run has."""
    if ":" in name and name not in REGISTERED:
        raise ValueError(
            f"claim: {name} is not registered; name it on the command line, or call"
            " esscher.reproduce.register"
        )


@functools.cache
def _own() -> dict[str, Claim]:
    found: list[Claim] = []
    for module in pkgutil.iter_modules(claims.__path__):
        found += importlib.import_module(f"{claims.__name__}.{module.name}").CLAIMS
    known = {claim.id: claim for claim in sorted(found, key=lambda claim: claim.number)}
    assert len(known) == len(found) == len({claim.number for claim in found}), (
        "two claims share an id or a number"
    )
    return known


def _imported(entry: str) -> Claim:
    module, _, name = entry.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as cause:
        raise ValueError(f"claim: {entry} cannot be imported: {cause}") from cause
    if not isinstance(found, Claim):
        raise ValueError(f"claim: expected module:NAME of a Claim, got {entry!r}")
    return found
