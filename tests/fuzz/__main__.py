"""python -m tests.fuzz --calls 30000 --seed 1: random calls of the public API against independent
references.

Prints a row for each family and every finding with the command that makes it again; exit 1 if there
is any.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

import torch

from tests.fuzz.draw import Draw
from tests.fuzz.driver import Family, Tally, one_call, run, table
from tests.fuzz.families import FAMILIES, calls_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", choices=[family.name for family in FAMILIES], action="append")
    parser.add_argument(
        "--call", type=int, help="this call of the family alone, with its exception"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        family for family in FAMILIES if options.family is None or family.name in options.family
    ]
    if options.call is not None:
        return _again(chosen[0], options.seed, options.call)
    tallies: dict[str, Tally] = {}
    for family in chosen:
        start = time.process_time()
        tallies[family.name] = run(family, calls_of(family, options.calls), options.seed)
        for finding in tallies[family.name].findings:
            print(finding, file=sys.stderr)
        print(f"{family.name}: {time.process_time() - start:.0f} s", file=sys.stderr, flush=True)
    print(table(tallies))
    return int(any(tally.bad for tally in tallies.values()))


def _again(family: Family, seed: int, index: int) -> int:
    try:
        family.call(Draw(seed, family.name, index))
    except Exception:
        traceback.print_exc()
    outcome, words, draw = one_call(family, seed, index)
    print(
        f"{outcome}: {words}\njunk: {draw.junk}, extreme: {draw.extreme}, called:"
        f" {sorted(draw.called)}"
    )
    return int(outcome not in ("refused", "checked"))


if __name__ == "__main__":
    sys.exit(main())
