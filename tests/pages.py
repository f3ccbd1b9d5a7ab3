"""Pages as tests: the python blocks of a page run in order; a text block right after one is what it
prints.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "blocks", "run_page"]

FENCE = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<body>.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: the word after its fence, its text, the line it starts on, and the output
    shown below it.
    """

    kind: str
    body: str
    line: int
    shown: str | None = None


def blocks(text: str, kind: str) -> list[Block]:
    """Fenced blocks of one kind, each with the text block that follows it with nothing but space
    between.
    """
    chosen = []
    for fence in FENCE.finditer(text):
        if fence["kind"].strip() != kind:
            continue
        line = text.count("\n", 0, fence.start("body")) + 1
        after = FENCE.match(text[fence.end() :].lstrip())
        shown = after["body"] if after is not None and after["kind"].strip() == "text" else None
        chosen.append(Block(kind, fence["body"], line, shown))
    return chosen


def run_page(path: Path) -> int:
    """Run the python blocks of a page in one namespace and compare what they print with what the
    page shows.
    """
    python = blocks(path.read_text("utf-8"), "python")
    namespace: dict[str, object] = {"__name__": path.stem}
    for block in python:
        printed = io.StringIO()
        # Empty lines in front, so that a traceback names the line of the page.
        code = compile("\n" * (block.line - 1) + block.body, str(path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.shown is not None:
            assert printed.getvalue() == block.shown, (
                f"{path.name}:{block.line} prints\n{printed.getvalue()}"
            )
    return len(python)
