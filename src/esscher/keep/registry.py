"""Rules by name, as texts call them; and the refusal of a bad one, which says what there is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esscher.keep.rule import Rule

__all__ = ["refused", "register", "rules"]

_RULES: dict[str, Callable[..., Rule]] = {}


def register(name: str, make: Callable[..., Rule]) -> None:
    """Let ``make`` be called by this name in texts."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"keep: expected a name of small letters, digits and _, got {name!r}")
    _RULES[name] = make


def rules() -> dict[str, Callable[..., Rule]]:
    """What may be written, by name."""
    return dict(_RULES)


def refused(message: str) -> ValueError:
    """The error to raise for a bad rule: one line that ends with the names of all rules."""
    return ValueError(f"{message}; rules: {', '.join(sorted(_RULES))}")
