"""``esscher reproduce``: the papers' claims and ours, each tested, each with a verdict that could
have come out otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import Dask, Json, Out, Workers, switch
from esscher.cli.output import end_run, log, number, print_json, show

if TYPE_CHECKING:
    from esscher.papers.claim import Scale
    from esscher.runs import Run


def reproduce(
    claims: Annotated[
        list[str] | None,
        typer.Argument(help="Ids or numbers of claims, or module:NAME of your own."),
    ] = None,
    everything: Annotated[bool, switch("--all", "Test every claim.")] = False,
    quick: Annotated[
        bool, switch("--quick", "Small settings (default): all claims in 40 minutes.")
    ] = False,
    full: Annotated[
        bool, switch("--full", "Settings of the table in the docs: all claims in 9 hours.")
    ] = False,
    seed: Annotated[int, switch("--seed", "Seed of everything random.", min=0, max=2**63 - 1)] = 0,
    workers: Workers = 1,
    dask: Dask = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Test claims of the papers and our own: verdict, effect with its interval, and reason. Without
    a claim, list them.

    Verdicts are stored in reproduce.json. The same command resumes where it was stopped, and claims
    share measurements.

    Example: esscher reproduce b-1-sub-parametric s-17-limit --quick
    """
    from esscher.papers.judge import all_claims, find_claim, judge
    from esscher.runs import terminal
    from esscher.runs.run import VERDICTS

    if everything and claims:
        raise ValueError(f"--all: takes every claim, got {claims[0]!r} too; give one of the two")
    if full and quick:
        raise ValueError("--quick and --full: expected one of the two, got both")
    chosen = [find_claim(name) for name in claims or ()]
    tested = chosen or [*all_claims().values()]
    if not (chosen or everything):
        said = [claim.described() for claim in tested]
        rows = [{key: one[key] for key in ("id", "statement", "source")} for one in said]
        return print_json(said) if as_json else show("claims: esscher reproduce ID", rows)
    scale: Scale = "full" if full else "quick"
    folder = out or Path("runs") / (f"reproduce-{scale}" + (f"-seed{seed}" if seed else ""))
    log(
        f"{len(tested)} claim{'s' * (len(tested) != 1)}, {scale}; verdicts in {folder / VERDICTS};"
        " the same command goes on where it stops"
    )

    def tell(record: Mapping[str, Any]) -> None:
        log(f"{record['id']}: {record['verdict']} ({record['seconds']:.0f} s): {record['reason']}")

    where = {"workers": workers, "dask": dask}
    content = judge(tested, scale, seed, folder, where, terminal, tell)
    ids = {claim.id for claim in tested}
    records = [record for record in content["claims"] if record["id"] in ids]
    if as_json:
        return print_json({**content, "claims": records})
    rows = []
    for record in records:
        value, low, high = (number(record[key], ".3g") for key in ("value", "low", "high"))
        interval = "" if low == high else f" [{low}, {high}]"
        effect = record["effect"] if record["value"] is None else f"{record['effect']} {value}"
        row = {"claim": record["id"], "verdict": record["verdict"], "effect": effect + interval}
        rows.append(row | {"why": record["reason"]})
    verdicts = Counter(record["verdict"] for record in records)
    told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    show(f"{told}: {folder / VERDICTS}", rows)


def end_evidence(run: Run, as_json: bool, **how: Any) -> None:
    """A run of one claim that was resumed: its rows; ``esscher reproduce`` decides by them."""
    claim = run.spec["claim"]
    log(f"evidence for claim {claim}; esscher reproduce {claim} decides by it")
    end_run(run, as_json, report=False, **how)
