"""A job for tests: deterministic numbers from torch-free code, with ways to be slow, to fail and to
die.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from esscher.runs import Column, Job, RunSpec, Shard, Unit, register
from esscher.runs.progress import advance

__all__ = ["SUMMARY", "WALK", "SummarySpec", "WalkSpec"]


class WalkSpec(RunSpec):
    """Random walks of different lengths; the rest is for tests."""

    job: Literal["walk"] = "walk"
    walks: int = 6
    steps: int = 5
    seconds: float = 0.0  # each unit sleeps so long
    work: int = 0  # each unit multiplies so many matrices
    raising: tuple[int, ...] = ()  # units that always raise
    # units that end their process by SIGKILL, until ``memory`` says they did often enough
    dying: tuple[int, ...] = ()
    deaths: int = 99
    memory: str = ""  # a folder where units leave marks of having been tried
    corpus: str = ""  # a file whose content is one of the run's hashes
    telling: int = 0  # each unit says so often how far it is
    uneven: bool = False  # the first unit is worth three others
    open_steps: bool = False  # leaves ``steps`` to be found out: 7


def units(spec: WalkSpec) -> list[Unit]:
    return [{"walk": number} for number in range(spec.walks)]


def compute(spec: WalkSpec, unit: Unit) -> dict[str, Any]:
    number = unit["walk"]
    tried = _mark(spec, number)
    if number in spec.raising:
        raise ArithmeticError(f"walk {number} leads nowhere")
    if number in spec.dying and tried <= spec.deaths:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    for part in range(spec.telling):
        advance((part + 1) / spec.telling)
    if spec.seconds:
        time.sleep(spec.seconds)
    generator = np.random.default_rng(spec.unit_seed(unit))
    matrix = generator.normal(size=(64, 64)) / 8
    for _ in range(spec.work):
        matrix = np.tanh(matrix @ matrix.T)
    steps = generator.normal(size=spec.steps + number % 3)
    print("what a job prints must not matter")
    return {
        "points": {
            "walk": np.full(len(steps), number),
            "step": np.arange(len(steps)),
            "place": np.cumsum(steps),
        },
        "ends": [
            {
                "walk": number,
                "end": float(steps.sum()),
                "name": f"w{number}",
                "sign": bool(steps.sum() > 0),
            }
        ],
    }


def _mark(spec: WalkSpec, number: int) -> int:
    """Leave a mark of this try and say how many there are."""
    if not spec.memory:
        return 0
    folder = Path(spec.memory)
    mark = folder / f"{number}.{os.getpid()}.{time.monotonic_ns()}"
    mark.write_text(os.environ.get("OMP_NUM_THREADS", ""), "utf-8")
    return len(list(folder.glob(f"{number}.*")))


def hashes(spec: WalkSpec) -> dict[str, str]:
    return {"corpus": Path(spec.corpus).read_text("utf-8")} if spec.corpus else {}


def columns(spec: WalkSpec) -> dict[str, list[Column]]:
    """Of one table, and not of all its columns."""
    return {
        "ends": [
            Column(
                "end",
                "float",
                "place at the end",
                "Sum of all steps, ±.",
                "linear",
                2,
                "end",
                ends=("low", "high"),
            ),
            Column("name", "word", "name", "Name of the walk.", "words", 0, words=("w0", "a word")),
            Column("far", "int", "far", "Not stored."),
        ]
    }


def filled_in(spec: WalkSpec) -> WalkSpec:
    if os.environ.get("ESSCHER_TEST_CANNOT_OPEN") and multiprocessing.parent_process() is not None:
        raise OSError("no model here")
    return spec.model_copy(update={"steps": 7, "open_steps": False}) if spec.open_steps else spec


def cost(spec: WalkSpec, unit: Unit) -> float:
    return 3.0 if spec.uneven and unit["walk"] == 0 else 1.0


WALK = Job(
    "walk", WalkSpec, units, compute, hashes=hashes, columns=columns, open=filled_in, cost=cost
)
register("walk", "tests.runs.job:WALK")


class SummarySpec(RunSpec):
    """Numbers, of which only a summary is kept."""

    job: Literal["summary"] = "summary"
    numbers: tuple[float, ...] = (1.5, 2.5, 4.0)
    fails: bool = False


def listed(spec: SummarySpec) -> list[Unit]:
    return [{"number": number} for number in spec.numbers]


def threads(spec: SummarySpec, unit: Unit) -> dict[str, Any]:
    import torch

    return {"seen": {"number": [unit["number"]], "threads": [torch.get_num_threads()]}}


def summarise(spec: SummarySpec, shards: Sequence[Shard]) -> dict[str, Any]:
    if spec.fails:
        raise ZeroDivisionError("no mean of nothing")
    seen = [row for shard in shards for row in shard.tables["seen"].to_pylist()]
    assert [row["number"] for row in seen] == [shard.unit["number"] for shard in shards]
    return {
        "summary": [
            {
                "sum": sum(row["number"] for row in seen),
                "threads": max(row["threads"] for row in seen),
            }
        ]
    }


SUMMARY = Job("summary", SummarySpec, listed, threads, summarise)
register("summary", "tests.runs.job:SUMMARY")
