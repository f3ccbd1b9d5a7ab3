"""``esscher budget``: how much of the key-value cache a probed model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esscher.cli.output import Json, number, path_argument, print_json, print_table
from esscher.cli.probe import show_totals

__all__ = ["budget"]


def budget(
    run: Annotated[Path, path_argument("Run directory of esscher probe.")],
    epsilon: Annotated[float, typer.Option(help="Relative root mean square error to allow.")] = 0.1,
    total: Annotated[int | None, typer.Option(help="Tokens to split between all key-value heads, instead of an error.")] = None,
    by: Annotated[str, typer.Option(help="Rows: head, or kv (key-value heads).")] = "kv",
    as_json: Json = False,
) -> None:
    """Tokens each head must keep for an error, and the best split of a total between heads against the uniform one.

    Keys are kept at random, each with the same chance: what a smarter choice of keys saves comes on top.

    Example: esscher budget runs/mine --epsilon 0.05 --by head
    """
    from esscher.models.probe.cache import BUDGET, budget_of
    from esscher.runs import load_run

    if by not in ("head", "kv"):
        raise ValueError(f"--by: expected head or kv, got {by!r}")
    stored = load_run(run)
    if stored.manifest.job != "probe":
        raise ValueError(f"{run}: expected a run of esscher probe, got one of {stored.manifest.job}")
    found = budget_of(stored.table("heads"), stored.table("curves"), epsilon, total)
    if as_json:
        tables = {name: getattr(found, name).to_dict("records") for name in ("heads", "caches", "totals")}
        print_json({"run": str(run), "epsilon": epsilon, "total": total, **tables})
        return
    columns = {column.key: column for column in BUDGET}
    kept = [columns[key].header for key in ("tokens", "ratio")]
    cache = stored.columns("heads")["kv_head"].header
    if by == "head":
        rows = [
            [f"{row['layer']}.{row['head']}", str(row["kv_head"]), number(row["tokens"], ","), number(row["ratio"], ".1%")]
            for row in found.heads.to_dict("records")
        ]
        print_table(f"tokens for an error of {epsilon:.1%}", ["head", cache, *kept], rows)
    else:
        rows = [
            [
                f"{row['layer']}.{row['kv_head']}",
                str(row["heads"]),
                number(row["tokens"], ","),
                number(row["ratio"], ".1%"),
                number(row["best_split"], ","),
            ]
            for row in found.caches.to_dict("records")
        ]
        print_table(f"tokens for an error of {epsilon:.1%}", [cache, "heads", *kept, "best split"], rows)
    show_totals(found.totals, columns)
