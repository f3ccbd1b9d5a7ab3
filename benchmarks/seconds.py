"""Where the time goes: ``python benchmarks/seconds.py [NAME ...]`` (``make profile``).

Processor seconds of one thread by what they are spent on, the ten most costly functions, and peak
memory; each case in a process of its own, after one run that compiles and fills caches. Time in
libraries is that of the function of ours that called them.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

# what a file, or one function of a file, is counted as; the first that fits
GROUPS = {
    "scores": ("hf/call.py", "keep/context.py", "pool_curve.py:_blocks", "pools.py:_view"),
    "ranking": ("keep/", "keep_curve.py:_by_size", "keep_curve.py:_add_up", "tails/"),
    "deposit": ("errors/scatter.py", "grid.py:update", "grid.py:reach", "grid.py:_reframe"),
    "contraction": ("errors/grid.py", "doubling.py:_block", "cumulants.py:block"),
    "integral": ("errors/",),
    "model": ("transformers/", "torch/nn/", "hf/"),
    "store": ("runs/", "pyarrow/", "pandas/"),
}
OTHER = "Python"
QUERIES, KEYS, WINDOW = 512, 8192, 2048

Work = Callable[[], object]


def curve(sampling: str) -> Work:
    import numpy as np
    import torch

    from esscher.errors.pool_curve import exact_pool_curve

    q, k, v = (torch.randn(rows, 32) for rows in (QUERIES, KEYS, KEYS))
    n = np.unique(np.logspace(0, np.log10(KEYS), 44).round()).astype(int)
    return lambda: exact_pool_curve(q, k, v, n, sampling)


def rules() -> Work:
    import torch

    from esscher.errors.keep_curve import KeepErrors
    from esscher.keep import parse
    from esscher.keep.context import Context
    from esscher.probe.spec import RULES, kept_sizes

    q, k, v = (torch.randn(rows, 64) for rows in (64, 4096, 4096))

    def work() -> None:
        errors = KeepErrors(Context.of(q, k, v))
        for rule in map(parse, RULES):
            errors.curve(rule, kept_sizes(4096))

    return work


def probe(**settings: Any) -> Work:
    """The first unit: one with keep rules, where they are compared."""
    from esscher.probe.job import compute, open_probe, units
    from esscher.probe.spec import ProbeSpec

    session = open_probe(ProbeSpec.read({"threads": 1, **settings}))
    return lambda: compute(session, units(session)[0])


def compress() -> Work:
    import torch

    from esscher.compress.api import compress
    from esscher.hf.loading import load_model

    loaded = load_model("smollm2", with_head=True)
    ids = torch.randint(100, 40_000, (1, WINDOW // 4))
    return lambda: compress(loaded.model, ids, keep=0.1, tokenizer=loaded.tokenizer)


LANGUAGE = {"model": "smollm2", "window": WINDOW, "queries": 256, "layers": [6, 18]}
CASES: dict[str, Callable[[], Work]] = {
    "curve": lambda: curve("replacement"),
    "kept": lambda: curve("bernoulli"),
    "rules": rules,
    "probe": lambda: probe(layers=[2]),
    "language": lambda: probe(**LANGUAGE, corpus={"max_tokens": 4 * WINDOW}),
    "compress": compress,
}


def group(code: tuple[str, int, str]) -> str | None:
    """What a function is counted as; None for one of a library, whose time is its callers'."""
    file, _, name = code
    for label, patterns in GROUPS.items():
        for pattern in patterns:
            part, _, function = pattern.partition(":")
            if part in file and function in ("", name):
                return label
    return OTHER if "esscher/" in file or "benchmarks/" in file else None


def spent(stats: dict[Any, Any]) -> tuple[Counter[str], Counter[str]]:
    """Seconds by group, and by function, with those of libraries that they called."""

    @cache
    def owners(code: Any) -> dict[Any, float]:
        """Which functions a function's time belongs to, in shares."""
        if group(code) is not None:
            return {code: 1.0}
        callers = {at: numbers[3] for at, numbers in stats[code][4].items() if at != code}
        total, found = sum(callers.values()), Counter[Any]()
        open_codes.add(code)
        for caller, seconds in callers.items():
            if total > 0 and caller not in open_codes:
                for owner, share in owners(caller).items():
                    found[owner] += share * seconds / total
        open_codes.discard(code)
        return found

    open_codes: set[Any] = set()
    groups, functions = Counter[str](), Counter[str]()
    for code, (_, _, own, _, _) in stats.items():
        for owner, share in (owners(code) or {code: 1.0}).items():
            groups[group(owner) or OTHER] += share * own
            file = owner[0].rpartition("esscher/")[2].rpartition("site-packages/")[2]
            functions[f"{file}:{owner[2]}"] += share * own
    return groups, functions


def report(name: str) -> None:
    """One case, in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = CASES[name]()
    work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = cProfile.Profile(time.process_time)
    profile.runcall(work)
    groups, functions = spent(pstats.Stats(profile).stats)  # type: ignore[attr-defined]
    cells = "  ".join(f"{label} {groups[label]:.2f}" for label in (*GROUPS, OTHER))
    print(f"{name}: {sum(groups.values()):.2f} s, peak {before / 2**20:.2f} GB; {cells}")
    for function, seconds in functions.most_common(10):
        print(f"  {seconds:8.3f} s  {function}")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        report(sys.argv[1])
    else:
        print(f"processor seconds of one thread; load of the machine {os.getloadavg()[0]:.1f}")
        single = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "NUMBA")}
        for case in sys.argv[1:] or CASES:
            subprocess.run([sys.executable, __file__, case], env=os.environ | single, check=False)
