"""The formats of figure files; known without what draws them."""

from __future__ import annotations

from pathlib import Path

FORMATS = ("svg", "pdf", "png")


def check_format(path: Path) -> str:
    """The format a figure's name asks for."""
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(
            f"figure: expected a file name ending in .{', .'.join(FORMATS)}, got {path.name!r}"
        )
    return kind
