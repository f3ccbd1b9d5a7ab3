"""Text that may come from anywhere (file names, models, other people's files) made fit for a
terminal or a log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["LONGEST", "one_line", "plain", "printable"]

LONGEST = 500  # characters of a line that says what is wrong


def printable(text: str) -> str:
    """The text with its control characters, escapes, text direction marks and half surrogates
    written out: \\x1b, \\u202e.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def one_line(text: str, most: int = LONGEST) -> str:
    """The text on one printable line; of a longer one the beginning and the end, where the remedy
    stands.
    """
    line = printable(" ".join(text.split()))
    if len(line) <= most:
        return line
    end = most // 3
    return f"{line[: most - end - 5]} ... {line[-end:]}"


def plain(value: Any) -> Any:
    """Numbers, lists and dictionaries; JSON has no infinity and no NaN, so these become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a number or an array of numpy's
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
