"""Run every benchmark of this folder: ``python benchmarks/run.py [NAME ...]``.

A benchmark is a file with ``main() -> list[str] | None``; each line, returned or printed, ends in
``ok``, ``near`` (over its bar, but within its noise) or ``over``, and is printed with the load of
the machine. The exit code is 1 when a returned line is over or a benchmark raised.
"""

from __future__ import annotations

import os

# Read by the libraries when they are imported, so this comes first: times are those of two cores.
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["MKL_NUM_THREADS"] = "2"
os.environ["NUMBA_NUM_THREADS"] = "2"
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # as esscher sets it where it comes before torch

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).parent


def load(path: Path) -> ModuleType:
    """A benchmark file as a module; what it imports from its own folder is found."""
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(folder: Path, names: list[str]) -> int:
    """Run the benchmarks of a folder, all or those named, and say how many lines are over their bar
    or failed.
    """
    files = sorted(path for path in folder.glob("*.py") if path.name != "run.py")
    unknown = set(names) - {path.stem for path in files}
    if unknown:
        known = ", ".join(path.stem for path in files)
        print(f"no benchmark {', '.join(sorted(unknown))}; there are: {known}", file=sys.stderr)
        return 2
    print(f"{'name':<56} {'noise':>6} {'ratio':>10} {'bar':>10}        load")
    over = 0
    for path in files:
        if names and path.stem not in names:
            continue
        try:
            main = getattr(load(path), "main", None)
            lines = main() if main is not None else None
        except Exception:
            traceback.print_exc()
            print(f"{path.stem}: raised", flush=True)
            over += 1
            continue
        for line in lines or []:
            print(f"{line:<92} {os.getloadavg()[0]:5.1f}", flush=True)
            over += line.split()[-1:] == ["over"]
    return int(over > 0)


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.path.insert(0, str(FOLDER))
    sys.exit(run(FOLDER, sys.argv[1:]))
