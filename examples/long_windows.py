"""How a probe of a language model grows with its windows: ``python examples/long_windows.py [MODEL]
[TOKENS ...]``.

One window of each length, 64 queries at its quarters, the heads of every third layer, no keep
rules; each in a process of its own, whose time and peak memory are printed, with the time of a
plain forward pass of the same window.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time

LENGTHS = (1024, 2048, 4096, 8192)
LAYERS = tuple(range(0, 30, 3))


def one(model: str, window: int) -> dict[str, float]:
    """In this process."""
    import torch

    import esscher as es
    from esscher.hf.capture import accepted
    from esscher.probe.job import open_probe
    from esscher.probe.spec import ProbeSpec

    torch.set_num_threads(2)
    settings = {
        "window": window,
        "queries": 64,
        "kept_queries": 16,
        "rules": "none",
        "fit": "64:4096",  # the same n for every window
        "threads": 2,
        "layers": LAYERS,
    }
    context = open_probe(
        ProbeSpec.read({"model": model, "corpus": {"max_tokens": window}, **settings})
    )
    start = time.perf_counter()
    with torch.no_grad():
        context.loaded.model(
            **context.inputs(context.queries.windows[:1]),
            **accepted(context.loaded.model, use_cache=False),
        )
    forward = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = es.probe(model, out=f"{folder}/run", max_tokens=window, **settings)
        seconds = time.perf_counter() - start
        heads = run.table("heads")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    failed = int((heads["status"] != "ok").sum())
    found = {
        "tokens": window,
        "forward": forward,
        "probe": seconds,
        "memory": memory,
        "failed": failed,
    }
    return found | {
        "exponent": float(heads["beta_fit"].median()),
        "effective": float(heads["effective_tokens"].median()),
    }


def main() -> None:
    model, *given = sys.argv[1:] or ["smollm2"]
    print(
        "tokens  forward  probe  peak memory  failed heads  median exponent  median effective"
        " tokens"
    )
    for window in [int(text) for text in given] or LENGTHS:
        code = f"import sys; sys.path.insert(0, {sys.path[0]!r}); import long_windows, json; "
        code += f"print(json.dumps(long_windows.one({model!r}, {window})))"
        answer = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        row = json.loads(answer.splitlines()[-1])
        print(
            f"{row['tokens']:6d}  {row['forward']:5.1f} s  {row['probe']:4.0f} s "
            f" {row['memory']:8.2f} GiB  {row['failed']:12d}  {row['exponent']:15.3f} "
            f" {row['effective']:23.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
