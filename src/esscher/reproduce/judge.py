"""Test claims: do their runs, or find them done, decide, and write the verdicts down as they come
(``reproduce.json``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from esscher.reproduce.claim import Claim, Decision, Scale
from esscher.runs import Run, RunError, RunLocked, RunSpec, execute
from esscher.runs.files import read_json
from esscher.runs.manifest import VERDICTS, now
from esscher.runs.printable import one_line, plain
from esscher.runs.progress import Report
from esscher.runs.provenance import commit, machine, versions
from esscher.runs.store import write_durable

__all__ = ["Asked", "check_rules", "judge", "read_verdicts"]

# What a machine may lack: a model, a text, memory, room on the disk. The claim is then undecided,
# and says so.
LACKING = (ValueError, OSError, ImportError, MemoryError, RunError)


@dataclass(frozen=True)
class Asked:
    """How claims are tested: at which scale, from which seed, in which folder, and where units are
    computed.
    """

    scale: Scale
    seed: int
    folder: Path
    execution: Mapping[str, Any]


def judge(
    claims: Sequence[Claim],
    asked: Asked,
    progress: Callable[[], Report | None],
    told: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Decide every claim; the content of ``reproduce.json``, in which verdicts of earlier calls
    stay.

    A run that is complete in the folder is not done again, whichever claim asked for it.
    ``progress`` makes what shows that of a claim's runs, ``told`` hears each verdict.
    """
    content: dict[str, Any] = {}
    made = {"commit": commit(), "cores": machine()["cores"], "versions": versions()}
    for claim in claims:
        record = _record(claim, asked, progress())
        earlier = read_verdicts(asked.folder) or {
            "claims": []
        }  # now, since another command may test other claims beside this one
        known = {one["id"]: one for one in earlier["claims"]} | {claim.id: record}
        order = sorted(known.values(), key=lambda one: (one["number"], one["id"]))
        content = {
            "scale": asked.scale,
            "seed": asked.seed,
            "written": now(),
            **made,
            "claims": order,
        }
        asked.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        write_durable(asked.folder / VERDICTS, text.encode("utf-8") + b"\n")
        told(record)
    return content


def read_verdicts(folder: Path) -> dict[str, Any] | None:
    """What was decided in a folder so far; None where nothing was."""
    path = folder / VERDICTS
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        if not all(isinstance(record.get("id"), str) for record in content["claims"]):
            raise ValueError("a claim without an id")
    except (ValueError, LookupError, AttributeError, TypeError) as cause:
        raise RunError(
            f"{path}: damaged ({cause}); remove it, and the verdicts are found again from the runs"
        ) from cause
    return content


def check_rules(claim: Claim, seed: int) -> dict[str, str]:
    """What the decision rule says of made-up tables: of those where the claim is true, and of those
    where it is false.
    """
    return {
        "true": claim.decide(claim.holds(seed)).verdict,
        "false": claim.decide(claim.fails(seed)).verdict,
    }


def _record(claim: Claim, asked: Asked, progress: Report | None) -> dict[str, Any]:
    """What is written of a claim."""
    specs = claim.runs(asked.scale, asked.seed)
    runs: dict[str, Run] = {}
    try:
        for name, spec in specs.items():
            runs[name] = execute(
                spec, folder_of(asked.folder, spec), **asked.execution, progress=progress
            )
    except RunLocked:  # another command is at it: that says nothing of the claim
        raise
    except LACKING as cause:
        nothing = float("nan")
        decision = Decision(
            "undecided",
            "not measured",
            nothing,
            nothing,
            nothing,
            f"not tested here: {one_line(str(cause) or type(cause).__name__)}",
        )
    else:  # a rule that fails is a mistake of ours, and shows itself
        decision = claim.decide({name: StoredTables(run) for name, run in runs.items()})
    flags = f" --seed {asked.seed}" if asked.seed else ""
    return {
        **claim.described(),
        **plain(asdict(decision)),
        "settings": {name: spec.as_dict() for name, spec in specs.items()},
        "runs": {
            name: {"folder": run.path.name, "seconds": _seconds(run)} for name, run in runs.items()
        },
        "seconds": round(sum(map(_seconds, runs.values())), 1),
        "command": f"esscher reproduce {claim.id} --{asked.scale}{flags}",
    }


def folder_of(folder: Path, spec: RunSpec) -> Path:
    """Where the run of a spec is kept, whichever claim asks for it."""
    return folder / f"{spec.job}-{spec.hash[:12]}"


class StoredTables(Mapping[str, Any]):
    """The tables of a run by name, each read when a rule asks for it: of a probe most rules need
    one.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def __getitem__(self, name: str) -> Any:
        if name not in self.run.tables:
            raise KeyError(name)
        return self.run.table(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.run.tables)

    def __len__(self) -> int:
        return len(self.run.tables)


def _seconds(run: Run) -> float:
    """From the last start of a run to its end: of one that was interrupted what was left to do."""
    if run.manifest.ended is None or not run.manifest.starts:
        return 0.0
    begun = datetime.fromisoformat(run.manifest.starts[-1].started)
    return round(max((datetime.fromisoformat(run.manifest.ended) - begun).total_seconds(), 0.0), 1)
