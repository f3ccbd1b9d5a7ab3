"""Runs: what storing and scheduling cost per unit, what a second process gains, how long reading
takes.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from ratio import ratio_line

from esscher.runs import Job, RunSpec, Unit, execute, register

READER = """
import sys, time
from esscher.runs import load_run
start = time.perf_counter()
frame = load_run(sys.argv[1]).table("digits")
assert len(frame) == 10_000
print(time.perf_counter() - start)
"""


class DigestSpec(RunSpec):
    """Units that do nothing but hash: no memory, no threads, the same time each."""

    job: Literal["digests"] = "digests"
    units: int
    rounds: int = 1


def units(spec: DigestSpec) -> list[Unit]:
    return [{"number": number} for number in range(spec.units)]


def compute(spec: DigestSpec, unit: Unit) -> dict[str, Any]:
    return {"digits": {"number": [unit["number"]], "digest": [digest(unit["number"], spec.rounds)]}}


def digest(number: int, rounds: int) -> str:
    return hashlib.pbkdf2_hmac("sha256", str(number).encode(), b"salt", rounds).hex()


DIGESTS = Job("digests", DigestSpec, units, compute)
# workers find this file by the path of the process that starts them
register("digests", "runs:DIGESTS")


def main() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return [*_overhead(Path(folder)), _speedup(Path(folder))]


def _overhead(folder: Path) -> list[str]:
    """10,000 units of a microsecond, in this process: all the time is the store's and the
    executor's.
    """
    count = 10_000
    start = time.perf_counter()
    run = execute({"job": "digests", "units": count}, folder / "tiny")
    each = (time.perf_counter() - start) / count * 1e3
    answer = subprocess.run(
        [sys.executable, "-c", READER, str(run.path)], capture_output=True, text=True, check=True
    )
    return [
        ratio_line("run of 10,000 tiny units: ms per unit / 3", each / 3, 1.0),
        ratio_line("load_run and a table of 10,000 rows: seconds / 1", float(answer.stdout), 1.0),
    ]


def _speedup(folder: Path) -> str:
    """Units of a tenth of a second each; starting the processes counts."""
    start = time.perf_counter()
    digest(0, 100_000)
    rounds = int(100_000 * 0.1 / (time.perf_counter() - start))
    spec = {"job": "digests", "units": 240, "rounds": rounds}
    seconds = {}
    for workers in (1, 2):
        start = time.perf_counter()
        execute(spec, folder / f"{workers}", workers=workers)
        seconds[workers] = time.perf_counter() - start
    one, two = ((folder / name / "digits.parquet").read_bytes() for name in ("1", "2"))
    assert one == two
    return ratio_line("compute-bound run: 2 processes / 1", seconds[2] / seconds[1], 1 / 1.6)
