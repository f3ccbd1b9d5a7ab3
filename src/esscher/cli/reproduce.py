"""``esscher reproduce``: the papers' claims and ours, each tested, each with a verdict that could
have come out otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from esscher.cli.options import Execution, Fields, Given
from esscher.cli.output import Json, Look, Out, log, number, print_json, print_table
from esscher.runs.spec import Plain

if TYPE_CHECKING:
    from esscher.papers.claim import Claim, Scale
    from esscher.runs import Run

HOW = Fields(
    "esscher.cli.reproduce:ReproduceFlags",
    ("everything", "quick", "full", "check"),
    flags={"everything": "all"},
)
SEED = Fields("esscher.papers.claim:EvidenceSpec", ("seed",), defaults=True)


def reproduce(
    look: Look,
    where: Execution,
    asked: Annotated[Given, HOW, SEED],
    claims: Annotated[
        list[str] | None,
        typer.Argument(help="Ids or numbers of claims, or module:NAME of your own."),
    ] = None,
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

    everything, full, seed = asked.get("everything", False), asked.get("full", False), asked["seed"]
    if everything and claims:
        raise ValueError(f"--all: takes every claim, got {claims[0]!r} too; give one of the two")
    if full and asked.get("quick"):
        raise ValueError("--quick and --full: expected one of the two, got both")
    chosen = [register(name) if ":" in name else find_claim(name) for name in claims or ()]
    if asked.get("check"):
        _show_check(chosen or all_claims().values(), seed, as_json, look)
        return
    if not (chosen or everything):
        _show_list(all_claims().values(), as_json, look)
        return
    from esscher.report.reproduce import write_verdicts
    from esscher.runs import terminal
    from esscher.runs.manifest import VERDICTS

    scale: Scale = "full" if full else "quick"
    folder = (
        out
        if out is not None
        else Path("runs") / (f"reproduce-{scale}" + (f"-seed{seed}" if seed else ""))
    )
    tested = chosen or list(all_claims().values())
    log(
        f"{len(tested)} claims, {scale}; verdicts in {folder / VERDICTS}; the same command goes on"
        " where it stops"
    )
    found = judge(tested, scale, seed, folder, where, terminal, _tell)
    page = write_verdicts(folder, found)
    ids = {claim.id for claim in tested}
    records = [record for record in found["claims"] if record["id"] in ids]
    if as_json:
        print_json({**found, "claims": records})
    else:
        _show_verdicts(records, str(folder), look)
        log(f"page: {page}")


def end_evidence(run: Run, as_json: bool) -> None:
    """A run of one claim that was resumed: its rows; ``esscher reproduce`` decides by them."""
    if as_json:
        print_json(
            {
                "run": str(run.path),
                "spec": run.spec,
                "evidence": run.table("evidence").to_dict("records"),
            }
        )
    else:
        log(
            f"evidence for claim {run.spec['claim']}; esscher reproduce {run.spec['claim']} decides"
            " by it"
        )


def _tell(record: Mapping[str, Any]) -> None:
    log(f"{record['id']}: {record['verdict']} ({record['seconds']:.0f} s): {record['reason']}")


def _show_list(claims: Iterable[Claim], as_json: bool, look: Given) -> None:
    records = [claim.described() for claim in claims]
    if as_json:
        print_json(records)
        return
    rows = [[record["id"], record["source"], record["statement"]] for record in records]
    print_table(
        "claims: esscher reproduce ID", ["claim", "source", "statement"], rows, left=3, look=look
    )


def _show_check(claims: Iterable[Claim], seed: int, as_json: bool, look: Given) -> None:
    from esscher.papers.judge import check_rule

    found = {claim.id: check_rule(claim, seed) for claim in claims}
    if as_json:
        print_json(found)
        return
    rows = [[name, verdicts["true"], verdicts["false"]] for name, verdicts in found.items()]
    print_table(
        "rules on made-up data",
        ["claim", "where it is true", "where it is false"],
        rows,
        left=3,
        look=look,
    )


def _show_verdicts(records: Iterable[Mapping[str, Any]], title: str, look: Given) -> None:
    rows = [
        [
            record["id"],
            record["verdict"],
            f"{record['effect']} {_interval(record)}".strip(),
            record["reason"],
        ]
        for record in records
    ]
    print_table(title, ["claim", "verdict", "effect", "why"], rows, left=4, look=look)


def _interval(record: Mapping[str, Any]) -> str:
    if record["value"] is None:
        return ""
    low, high = (number(record[end], ".3g") for end in ("low", "high"))
    return number(record["value"], ".3g") + ("" if low == high else f" [{low}, {high}]")


# ---- How claims are tested, as flags say it.


class ReproduceFlags(Plain):
    """Which claims, and how thoroughly."""

    everything: bool = Field(default=False, description="test every claim")
    quick: bool = Field(default=False, description="in minutes, as without a flag")
    full: bool = Field(default=False, description="at the size of the page on what holds, in hours")
    check: bool = Field(
        default=False, description="try the rules on made-up data, true and false, and stop"
    )
