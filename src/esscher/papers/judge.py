"""Run the experiments of claims and judge them: verdicts, with the numbers that they rest on, go
into ``reproduce.json``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from esscher.papers.claim import CLAIMS, Claim, Decision, EvidenceSpec, Scale
from esscher.papers.rules import exactly
from esscher.runs import Job, Run, RunError, RunLocked, RunSpec, Unit, execute
from esscher.runs.errors import one_line, plain
from esscher.runs.progress import Report
from esscher.runs.run import VERDICTS, commit, machine, now, versions
from esscher.runs.store import read_json, write_durable

# What a machine may lack: a model, a text, memory, disk space. The claim is then undecided.
LACKING = (ValueError, OSError, ImportError, MemoryError, RunError)


def all_claims() -> dict[str, Claim]:
    """Every claim: those of this package by id, in the order of numbers, then those from outside by
    their entries.
    """
    for module in ("laws", "heads", "icl"):
        importlib.import_module(f"esscher.papers.claims_{module}")
    return dict(sorted(CLAIMS.items(), key=lambda known: (":" in known[0], known[1].number)))


def find_claim(name: str) -> Claim:
    """A claim by its id or number, or by the entry "module:NAME" of one from outside."""
    if ":" in name:
        return CLAIMS.get(name) or register(name)
    for id, claim in all_claims().items():
        if ":" not in id and name in (id, str(claim.number)):
            return claim
    raise ValueError(
        "claim: expected an id or a number that esscher reproduce lists, or module:NAME of your"
        f" own, got {name!r}"
    )


def register(entry: str) -> Claim:
    """Let runs name a claim from outside: ``entry`` is "module:NAME" of a :class:`Claim`. No file
    of a run can do that.
    """
    module, _, name = entry.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as cause:
        raise ValueError(f"claim: {entry} cannot be imported: {cause}") from cause
    if not isinstance(found, Claim):
        raise ValueError(f"claim: expected module:NAME of a Claim, got {entry!r}")
    CLAIMS[entry] = found
    return found


def units(spec: EvidenceSpec) -> Iterator[Unit]:
    """The parts. The file of a run cannot name code: an entry has to be registered."""
    if ":" in spec.claim and spec.claim not in CLAIMS:
        raise ValueError(
            f"claim: {spec.claim} is not registered; name it on the command line, or call"
            " esscher.papers.judge.register"
        )
    yield from ({"part": i, **settings} for i, settings in enumerate(spec.parts))


def compute(spec: EvidenceSpec, unit: Unit) -> dict[str, Any]:
    """The rows of one part, drawn from its own seed."""
    claim = find_claim(spec.claim)
    assert claim.measure is not None, f"claim {claim.id} measures nothing itself"
    settings = {name: value for name, value in unit.items() if name != "part"}
    rows = claim.measure(**settings, rng=np.random.default_rng([spec.seed, unit["part"]]))
    return {"evidence": [{"part": unit["part"], **row} for row in rows]}


EVIDENCE = Job("evidence", EvidenceSpec, units, compute)


def judge(
    claims: Sequence[Claim],
    scale: Scale,
    seed: int,
    folder: Path,
    execution: Mapping[str, Any],
    progress: Callable[[], Report | None] = lambda: None,
    told: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Decide every claim and return the content of ``reproduce.json``, earlier verdicts included.

    A run that is complete in the folder is not done again, whichever claim asked for it.
    ``execution`` says where units are computed (workers, dask), ``progress`` makes the display of a
    claim's runs, ``told`` hears each verdict.
    """
    content: dict[str, Any] = {}
    made = {"commit": commit(), "cores": machine()["cores"], "versions": versions()}
    for claim in claims:
        record = _tested(claim, scale, seed, folder, execution, progress())
        earlier = read_verdicts(folder)  # now: another command may have added to it meanwhile
        known = {one["id"]: one for one in earlier["claims"]} if earlier else {}
        records = {**known, claim.id: record}.values()
        ordered = sorted(records, key=lambda one: (one["number"], one["id"]))
        content = {"scale": scale, "seed": seed, "written": now(), **made, "claims": ordered}
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        write_durable(folder / VERDICTS, text.encode("utf-8") + b"\n")
        told(record)
    return content


def read_verdicts(folder: Path) -> dict[str, Any] | None:
    """The verdicts stored in a folder; None if there are none."""
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


def folder_of(folder: Path, spec: RunSpec) -> Path:
    """Where the run of a spec is kept, whichever claim asks for it."""
    return folder / f"{spec.job}-{spec.hash[:12]}"


def _tested(
    claim: Claim,
    scale: Scale,
    seed: int,
    folder: Path,
    execution: Mapping[str, Any],
    progress: Report | None,
) -> dict[str, Any]:
    """The record of one claim: its words, its verdict, and the runs behind it."""
    specs, runs = claim.runs(scale, seed), {}
    try:
        for name, spec in specs.items():
            runs[name] = execute(spec, folder_of(folder, spec), **execution, progress=progress)
    except RunLocked:  # another command is at it: that says nothing of the claim
        raise
    except LACKING as cause:
        reason = f"not tested here: {one_line(str(cause) or type(cause).__name__)}"
        decision = Decision("undecided", "not measured", exactly(float("nan")), reason)
    else:  # an error in a rule is a mistake of ours, and is raised
        decision = claim.decide(
            {name: {table: run.table(table) for table in run.tables} for name, run in runs.items()}
        )
    seconds = {name: _seconds(run) for name, run in runs.items()}
    return {
        **claim.described(),
        "verdict": decision.verdict,
        "effect": decision.effect,
        **plain(decision.found._asdict()),
        "reason": decision.reason,
        "picture": plain(asdict(decision.picture)) if decision.picture else None,
        "settings": {name: spec.as_dict() for name, spec in specs.items()},
        "runs": {
            name: {"folder": run.path.name, "seconds": seconds[name]} for name, run in runs.items()
        },
        "seconds": round(sum(seconds.values()), 1),
        "command": f"esscher reproduce {claim.id} --{scale}" + (f" --seed {seed}" if seed else ""),
    }


def _seconds(run: Run) -> float:
    """Seconds from the last start of a complete run to its end."""
    begun, ended = map(
        datetime.fromisoformat, (run.manifest.starts[-1].started, str(run.manifest.ended))
    )
    return round(max((ended - begun).total_seconds(), 0.0), 1)
