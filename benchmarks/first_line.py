"""What every command makes its user wait for: ``python benchmarks/first_line.py [COMMAND ...]``.

Seconds to the first line (of stdout or stderr), seconds in all, and peak memory of its largest
process, on small inputs; the defaults of ``probe`` and a language model's windows of 2048 tokens
are what a user would run. Each command is a process of its own, in one folder that starts empty.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

COMMANDS = (  # in an order in which each finds the runs it reads
    "--version",
    "--help",
    "describe",
    "describe smollm2",
    "probe --out minilm",
    "probe smollm2 --window 2048 --max-tokens 8192 --layers 6,18 --out smollm2",
    "budget smollm2",
    "compress smollm2 --texts 1 --rules snapkv --keep 0.1 --window 512 --out compressed",
    "predict --gaussian --dim 50 --horizon 1.5 --n 1e3:1e12",
    "converge gaussian --repeats 2 --n 100,1000 --out converged",
    "icl train --lengths 10 --steps 2000 --seeds 1 --out trained",
    "icl flow --lengths 10,1000,1e6",
    "icl length --epsilon .1,.01 --task-cov identity --noise 0",
    "icl concentration --lengths 10,100 --repeats 4",
    "icl stability --starts 4 --lengths 10",
    "icl figures --quick --only fig2 --out figures",
    "reproduce",
    "reproduce s-17-limit",
    "cite",
    "ls",
    "resume minilm",
    "report minilm",
    "fit minilm",
    "export minilm",
)


def measure(command: str, folder: str) -> str:
    """A line: seconds to the first line, seconds in all, peak memory, the command; its last words
    where it fails.
    """
    start = time.perf_counter()
    running = subprocess.Popen(
        [sys.executable, "-m", "esscher", *command.split()],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert running.stdout is not None
    said, first = b"", float("nan")
    for line in running.stdout:
        if line.strip() and not said:
            first = time.perf_counter() - start
        said = line if line.strip() else said
    _, status, used = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    seconds, peak = time.perf_counter() - start, used.ru_maxrss / 2**20
    words = f"  failed: {said.decode().strip()}" if running.returncode else ""
    return f"{first:10.1f} {seconds:8.1f} {peak:9.2f}  esscher {command}{words}"


if __name__ == "__main__":
    print(f"load {os.getloadavg()[0]:.1f}\n{'first line':>10} {'seconds':>8} {'peak GB':>9}")
    asked = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            if not asked or command.split()[0] in asked:
                print(measure(command, folder), flush=True)
