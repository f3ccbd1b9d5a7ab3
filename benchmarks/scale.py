"""What a probe costs by tokens, heads, queries, width and workers: ``python benchmarks/scale.py``.

Each line is a command in a process of its own, one setting away from 4 heads of one layer, 256
queries and 16,384 tokens: processor seconds, seconds by the clock, and memory of its largest
process. Below: how long large probes take by ``esscher describe``'s count of operations, at the
speed of this machine. Load from others shows in seconds by the clock.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE = {
    "packaged": "bible",
    "max-tokens": 16384,
    "layers": 2,
    "heads": "0-3",
    "queries": 256,
    "threads": 1,
}
SPLIT = {"max-tokens": 131072, "part": 16384}  # in eight units
LINES = (
    *({"max-tokens": 4**power} for power in range(5, 11)),
    *({"heads": heads} for heads in ("0", "0-11")),
    *({"queries": queries} for queries in (64, 1024)),
    {"model": "smollm2", "pool": "corpus"},  # heads of width 64 in place of 32
    *({**SPLIT, "workers": workers} for workers in (1, 2)),
    {**SPLIT, "dask": 2},
)
LARGE: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # configurations of transformers, a probe of them
    "BERT-base, 20,000,000 tokens": (
        {"model_type": "bert"},
        {"corpus": {"max_tokens": 20_000_000}},
    ),
    "7B, 32 windows of 8192 tokens": (
        {"model_type": "llama", "max_position_embeddings": 8192},
        {"corpus": {"max_tokens": 32 * 8192}, "window": 8192, "dtype": "bfloat16"},
    ),
}
WORKERS = (1, 16, 256)


def measure(changed: dict[str, object], folder: str) -> str:
    """A line of the table."""
    settings = BASE | changed
    command = [sys.executable, "-m", "esscher", "probe", str(settings.pop("model", "minilm"))]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    start = time.perf_counter()
    running = subprocess.Popen(
        [*command, "--no-report", "--out", tempfile.mkdtemp(dir=folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    seconds, spent = time.perf_counter() - start, used.ru_utime + used.ru_stime
    failed = "  failed" if running.returncode else ""
    what = ", ".join(f"{name} {value}" for name, value in changed.items())
    return f"| {what} | {spent:.0f} | {seconds:.0f} | {used.ru_maxrss / 2**20:.2f} |{failed}"


def measure_all(folder: str) -> None:
    print(f"load {os.getloadavg()[0]:.1f}\n| probe | processor s | s | GB |\n|---|---|---|---|")
    for line in LINES:
        if "dask" not in line:
            print(measure(line, folder), flush=True)
            continue
        from distributed import LocalCluster

        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            print(measure({**line, "dask": cluster.scheduler_address}, folder), flush=True)


def estimate(name: str, folder: str) -> str:
    """Hours on some numbers of workers, and memory of each."""
    from esscher.describe import describe
    from esscher.probe.spec import ProbeSpec

    config, settings = LARGE[name]
    path = Path(tempfile.mkdtemp(dir=folder))
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    cost = describe(path, asked=ProbeSpec.read({"model": str(path), **settings})).cost
    assert cost is not None
    hours = (
        f"{math.ceil(cost.units / workers) / cost.units * cost.seconds / 3600:.3g}"
        for workers in WORKERS
    )
    return f"| {name} | {cost.units} | {' | '.join(hours)} | {cost.bytes / 2**30:.1f} |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if "--estimate" not in sys.argv:
            measure_all(folder)
        print(f"\n| probe | units | {' | '.join(f'h on {n}' for n in WORKERS)} | GB each |")
        print(f"|{'---|' * (len(WORKERS) + 3)}")
        for name in LARGE:
            print(estimate(name, folder), flush=True)
