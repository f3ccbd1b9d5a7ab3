"""``esscher reproduce``: the papers' claims and ours, each tested, each with a verdict that could
have come out otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import Execution
from esscher.cli.output import Json, Look, Out, log, number, print_json, print_table

if TYPE_CHECKING:
    from esscher.papers.claim import Scale
    from esscher.runs import Run

CLAIMS = typer.Argument(help="Ids or numbers of claims, or module:NAME of your own.")
ALL = typer.Option("--all", help="Test every claim.")
QUICK = typer.Option("--quick", help="In minutes, as without a flag.")
FULL = typer.Option("--full", help="At the size of the page on what holds, in hours.")
CHECK = typer.Option("--check", help="Try the rules on made-up data, true and false, and stop.")
SEED = typer.Option("--seed", min=0, help="Seed of everything random.")


def reproduce(
    look: Look,
    where: Execution,
    claims: Annotated[list[str] | None, CLAIMS] = None,
    everything: Annotated[bool, ALL] = False,
    quick: Annotated[bool, QUICK] = False,
    full: Annotated[bool, FULL] = False,
    check: Annotated[bool, CHECK] = False,
    seed: Annotated[int, SEED] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Test what the papers claim, and what we do: verdict, effect with its interval, and why.
    Without a claim: the list.

    Verdicts are kept in reproduce.json as they come; the same command goes on where it was stopped,
    and what was measured for one claim is not measured again for another.

    Example: esscher reproduce b-1-sub-parametric s-17-limit --quick
    """
    from esscher.papers.judge import all_claims, find_claim, judge, register
    from esscher.report.reproduce import write_verdicts
    from esscher.runs import terminal
    from esscher.runs.manifest import VERDICTS

    if everything and claims:
        raise ValueError(f"--all: takes every claim, got {claims[0]!r} too; give one of the two")
    if full and quick:
        raise ValueError("--quick and --full: expected one of the two, got both")
    chosen = [register(name) if ":" in name else find_claim(name) for name in claims or ()]
    tested = chosen or [*all_claims().values()]
    if check or not (chosen or everything):
        found: Any = [claim.described() for claim in tested]
        title, names = "claims: esscher reproduce ID", ["claim", "source", "statement"]
        rows = [[said["id"], said["source"], said["statement"]] for said in found]
        if check:
            found = {claim.id: claim.checked(seed) for claim in tested}
            title, names = (
                "rules on made-up data",
                ["claim", "where it is true", "where it is false"],
            )
            rows = [[name, *verdicts.values()] for name, verdicts in found.items()]
        print_json(found) if as_json else print_table(title, names, rows, left=3, look=look)
        return
    scale: Scale = "full" if full else "quick"
    folder = out or Path("runs") / (f"reproduce-{scale}" + (f"-seed{seed}" if seed else ""))
    log(
        f"{len(tested)} claims, {scale}; verdicts in {folder / VERDICTS}; the same command goes on"
        " where it stops"
    )
    content = judge(tested, scale, seed, folder, where, terminal, _tell)
    page = write_verdicts(folder, content)
    ids = {claim.id for claim in tested}
    records = [record for record in content["claims"] if record["id"] in ids]
    if as_json:
        print_json({**content, "claims": records})
        return
    keys = ("id", "verdict", "effect", "reason")
    rows = [
        [f"{record[key]} {_interval(record) if key == 'effect' else ''}".strip() for key in keys]
        for record in records
    ]
    print_table(str(folder), ["claim", "verdict", "effect", "why"], rows, left=4, look=look)
    log(f"page: {page}")


def end_evidence(run: Run, as_json: bool) -> None:
    """A run of one claim that was resumed: its rows; ``esscher reproduce`` decides by them."""
    if as_json:
        rows = run.table("evidence").to_dict("records")
        print_json({"run": str(run.path), "spec": run.spec, "evidence": rows})
    else:
        claim = run.spec["claim"]
        log(f"evidence for claim {claim}; esscher reproduce {claim} decides by it")


def _tell(record: Mapping[str, Any]) -> None:
    log(f"{record['id']}: {record['verdict']} ({record['seconds']:.0f} s): {record['reason']}")


def _interval(record: Mapping[str, Any]) -> str:
    if record["value"] is None:
        return ""
    low, high = (number(record[end], ".3g") for end in ("low", "high"))
    return number(record["value"], ".3g") + ("" if low == high else f" [{low}, {high}]")
