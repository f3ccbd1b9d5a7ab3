"""Statement: one numbered statement of [S], as printed and mended, with a check that computes what
we find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Finding", "Statement", "Verdict"]

Verdict = Literal[
    "holds",
    "holds, mended",
    "false as printed, mended",
    "assumption, met",
    "assumption, met in part",
]


@dataclass(frozen=True)
class Finding:
    """What a check computed, in words, and whether it agrees with the statement's verdict."""

    measured: str
    agrees: bool


@dataclass(frozen=True)
class Statement:
    """``says``: what the paper claims, in a sentence. ``printed`` and ``mended``: its formula, and
    ours where it differs ("as printed" where it does not). ``check``: computes a case that would
    show the verdict wrong.
    """

    number: str
    says: str
    printed: str
    mended: str
    verdict: Verdict
    check: Callable[[], Finding]

    def __post_init__(self) -> None:
        assert self.verdict in get_args(Verdict), self.verdict
