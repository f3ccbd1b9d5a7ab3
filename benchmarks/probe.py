"""What a probe costs, in fused attention passes over the same query-key pairs."""

from __future__ import annotations

import shutil
import tempfile
import time

import numpy as np
import torch
from ratio import ratio_line

import esscher as es
from esscher.attention.state import attend_block
from esscher.probe.job import compute, open_probe, units
from esscher.probe.spec import ProbeSpec

KEYS, QUERIES = 16384, 256
ROUNDS = 2
BAR, PROCESSES = 40.0, 160.0


def main() -> list[str]:
    torch.set_num_threads(2)
    spec = ProbeSpec.read({"threads": 2})
    context = open_probe(spec)  # the model and the text are loaded here, which is not timed
    work = units(context)
    compute(context, work[0])  # and compiled code is ready
    layers, heads, width = len(context.layers), 12, 32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(heads, rows, width, generator=generator) for rows in (QUERIES, KEYS, KEYS)
    )
    best = dict.fromkeys(("probe", "model", "fused"), float("inf"))
    windows = np.arange(len(context.windows))
    batches = np.split(windows, range(0, len(windows), spec.batch // context.windows.length))
    for _ in range(ROUNDS):
        # the tokens it held are forgotten with the old one
        context = open_probe(spec, context.loaded)
        start = time.perf_counter()
        for unit in work:
            compute(context, unit)
        best["probe"] = min(best["probe"], time.perf_counter() - start)
        start = time.perf_counter()
        with torch.no_grad():
            for batch in batches[1:]:
                context.loaded.model(**context.inputs(batch))
        best["model"] = min(best["model"], time.perf_counter() - start)
        for _ in range(5):
            start = time.perf_counter()
            for head in range(heads):
                attend_block(q[head], k[head], v[head], width**-0.5, None)
            best["fused"] = min(best["fused"], (time.perf_counter() - start) * layers)
    passes = (best["probe"] - best["model"]) / best["fused"]
    seconds = f"{best['probe']:.1f} s, without the model's own {best['model']:.1f} s"
    return [
        ratio_line(f"probe of 72 heads / fused attention ({seconds})", passes, BAR),
        *processes(best["fused"]),
    ]


def processes(fused: float) -> list[str]:
    """The whole command's work in two processes, start-up included."""
    folder = tempfile.mkdtemp()
    try:
        start = time.perf_counter()
        es.probe(out=f"{folder}/run", workers=2)
        seconds = time.perf_counter() - start
    finally:
        shutil.rmtree(folder)
    return [
        ratio_line(
            f"the same in 2 processes, with start-up ({seconds:.0f} s)", seconds / fused, PROCESSES
        )
    ]
