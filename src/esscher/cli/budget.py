"""``esscher budget``: how much of the key-value cache a keep rule needs in a probed model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.options import All, Markdown, Sort, Top, given, option
from esscher.cli.output import (
    Json,
    brief,
    log,
    path_argument,
    path_option,
    print_json,
    say,
    show,
)
from esscher.probe.spec import ALLOWED, FLOOR, BudgetFlags

if TYPE_CHECKING:
    import pandas as pd

    from esscher.probe.budget import Budget, Weights
    from esscher.runs import Run

TOTALS = ["rule", "chosen", "ratio", "error", "worst_head", "worst", "worst_layer"]
SPLITS = ["split", "keys", "ratio", "error", "q95", "worst_head", "worst", "worst_layer"]


def budget(
    run: Annotated[Path, path_argument("Run directory of esscher probe.")],
    rule: Annotated[str | None, option(BudgetFlags, "rule", default="every rule")] = None,
    epsilon: Annotated[float | None, option(BudgetFlags, "epsilon", default=f"{ALLOWED:g}")] = None,
    total: Annotated[int | None, option(BudgetFlags, "total")] = None,
    weights: Annotated[
        str | None, option(BudgetFlags, "weights", default="gradients of log p of this run")
    ] = None,
    by: Annotated[str, typer.Option(help="Rows: head, or kv (key-value heads).")] = "kv",
    export: Annotated[
        str | None, typer.Option(help="Write the budget of the rule: json, yaml or kvpress.")
    ] = None,
    out: Annotated[
        Path | None, path_option("--out", "New file of the export; stdout when left out.")
    ] = None,
    top: Top = None,
    sort: Sort = None,
    markdown: Markdown = False,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Keys each head must keep for an error, and the best split of a total between heads.

    For the keep rule you name; without one, the totals of every rule that the run measured. A run
    whose pool is the corpus has one rule: random keys. In a split a language model's heads count by
    the gradient of log p at the head's output; where a run has no gradients, as of an encoder,
    relative errors count alike.

    Percentages of the cache are keys kept over keys that the cache holds, summed over layers and
    key-value heads; a sliding-window layer holds at most its window. The uniform split keeps the
    same percentage of every head's cache. Rows are key-value heads: heads that share keys share
    a row; --by head adds what each query head alone would need.

    Example: esscher budget runs/mine --rule heavy --epsilon 0.1 --export json --out heavy.json
    """
    look = given(locals())
    from esscher.probe.budget import (
        RANDOM,
        budget_table,
        find_rule,
        frontier_of,
        rule_budget,
        split_weights,
    )
    from esscher.runs import load_run

    _check(by, export, out, as_json)
    stored = load_run(run)
    frontier = frontier_of(stored)
    if export == "kvpress" and (epsilon is not None or total is not None):
        raise ValueError(
            "--export kvpress: it holds a split for every share to drop; leave --epsilon and"
            " --total out"
        )
    counts, counted = split_weights(stored, weights)
    about = {**_about(stored), "weights": counted}
    epsilon = ALLOWED if epsilon is None and total is None else epsilon
    if rule is None and "frontier" in stored.tables:
        if export is not None:
            known = ", ".join(dict.fromkeys(frontier["rule"]))
            raise ValueError(f"--export: give the rule, one of {known}")
        totals = budget_table(frontier, [(epsilon, total)], counts)
        if as_json:
            rows = totals.to_dict("records")
            return print_json({**about, "epsilon": epsilon, "total": total, "rules": rows})
        return _show_rules(totals, about, _asked(epsilon, total), look)
    rule = find_rule(frontier, RANDOM if rule is None else rule)
    if export is not None:
        content: Any
        if export == "kvpress":
            content = _kvpress(stored, frontier, rule, counts)
        else:
            from esscher.probe.budget import budget_record

            content = budget_record(rule_budget(frontier, rule, epsilon, total, counts), about)
        return _write(content, export, out)
    found = rule_budget(frontier, rule, epsilon, total, counts)
    if as_json:
        names = ("heads", "caches", "totals") if by == "head" else ("caches", "totals")
        tables = {name: getattr(found, name).to_dict("records") for name in names}
        asked = {"rule": found.rule, "epsilon": found.epsilon, "total": found.total}
        return print_json({**about, **asked, **tables})
    _show_rule(found, about, _asked(epsilon, total), by, look)


def _check(by: str, export: str | None, out: Path | None, as_json: bool) -> None:
    from esscher.probe.budget import KINDS

    if by not in ("head", "kv"):
        raise ValueError(f"--by: expected head or kv, got {by!r}")
    if export is not None and export not in KINDS:
        raise ValueError(f"--export: expected {', '.join(KINDS)}, got {export!r}")
    if export is None and out is not None:
        raise ValueError(
            "--out: it names the file of --export; give --export json, yaml or kvpress"
        )
    if export is not None and as_json:
        raise ValueError(
            "--json: --export prints or writes the budget already; leave one of them out"
        )
    if out is not None and os.path.lexists(out):
        raise ValueError(f"{out}: it exists already; give another name")


def _about(stored: Run) -> dict[str, Any]:
    """What a budget holds for."""
    from esscher.probe.session import measured_part

    row = stored.table("about").iloc[0]
    found = {"run": str(stored.path), "model": str(row["model"]), "part": measured_part(stored)}
    return {**found, "text": str(row["text"]), "window": int(row["window"])}


def _asked(epsilon: float | None, total: int | None) -> str:
    return f"an error of {epsilon:.1%}" if epsilon is not None else f"{total:,} keys in all"


def _columns() -> dict[str, Any]:
    from esscher.probe.budget import BUDGET

    return {column.key: column for column in BUDGET}


def _show_rules(
    totals: pd.DataFrame, about: Mapping[str, Any], asked: str, look: Mapping[str, Any]
) -> None:
    """The smallest cache, or the least error, by rules that one could run; then every rule."""
    key = "ratio" if totals["epsilon"].notna().all() else "error"
    best = totals[totals["split"] == "best split"]
    once = best[(best["chosen"] == "once") & (best["rule"] != FLOOR)]
    if len(once):
        row = once.loc[once[key].idxmin()]
        say(
            f"For {asked}: {row['rule']} keeps {row['ratio']:.1%} of the cache in its best split,"
            f" at an error of {row['error']:.1%} (worst head {row['worst_head']}:"
            f" {row['worst']:.1%}); {about['part']}, {about['text']}, {about['weights']}."
        )
    if look.get("everything"):
        show(f"keep rules for {asked}", totals, _columns(), look)
    else:
        ordered = best.sort_values(["chosen", key], ascending=[False, True])
        show(f"keep rules for {asked}, best split", ordered[TOTALS], _columns(), brief(look))
    say(f"Next: esscher budget {about['run']} --rule NAME, for the keys of each head")


def _show_rule(
    found: Budget, about: Mapping[str, Any], asked: str, by: str, look: Mapping[str, Any]
) -> None:
    """What each split keeps, then the heads or caches of one rule."""
    from esscher.probe.budget import per_query

    told = ", ".join(
        f"{row['split']} {row['ratio']:.1%} at an error of {row['error']:.1%}"
        for row in found.totals.to_dict("records")
    )
    reads = " (what a query reads: the cache holds all)" if per_query(found.rule) else ""
    say(f"{found.rule}{reads} for {asked} keeps of the cache: {told}.")
    place = "head" if by == "head" else "kv_head"
    rows = found.heads if by == "head" else found.caches
    rows = rows.drop(columns=["heads", "n_keys"], errors="ignore")
    rows = rows.sort_values("keys", ascending=False, kind="stable")
    title = f"keys of each {place.replace('_', ' ')}; {about['part']}, {about['text']}"
    show(title, rows, _columns(), look if look.get("everything") else brief(look))
    if look.get("everything"):
        show(f"splits; {about['weights']}", found.totals[SPLITS], _columns())
    say(
        f"Next: esscher budget {about['run']} --rule {found.rule} --export json --out budget.json,"
        " for the keys of every head as a file"
    )


def _kvpress(stored: Run, frontier: pd.DataFrame, rule: str, weights: Weights | None) -> Any:
    from esscher.probe.budget import prune_ratios

    about = stored.table("about").iloc[0]
    return prune_ratios(frontier, rule, int(about["layers"]), int(about["kv_heads"]), weights)


def _write(content: Any, kind: str, out: Path | None) -> None:
    from esscher.probe.budget import as_bytes
    from esscher.runs.store import write_durable

    data = as_bytes(content, kind, "" if out is None else out.suffix)
    if out is None:
        return print(data.decode(), end="")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_durable(out, data)
    log(str(out))
