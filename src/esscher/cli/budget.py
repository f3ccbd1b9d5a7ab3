"""``esscher budget``: how much of the key-value cache a keep rule needs in a probed model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.cli.heads_table import held_for, rules_in_words, show_rules, show_splits
from esscher.cli.options import Fields, Given
from esscher.cli.output import (
    Form,
    Json,
    Look,
    Shown,
    log,
    number,
    path_argument,
    path_option,
    print_json,
    say,
    show_table,
    shown,
)
from esscher.probe.spec import ALLOWED

if TYPE_CHECKING:
    import pandas as pd

    from esscher.probe.budget import Budget, Weights
    from esscher.runs import Run

ASKED = Fields(
    "esscher.probe.spec:BudgetFlags",
    ("rule", "epsilon", "total", "weights"),
    left_out={
        "rule": "every rule of the run",
        "epsilon": f"{ALLOWED:g}",
        "weights": "the gradients of log p of this run",
    },
)


def budget(
    run: Annotated[Path, path_argument("Run directory of esscher probe.")],
    asked: Annotated[Given, ASKED],
    look: Look,
    by: Annotated[str, typer.Option(help="Rows: head, or kv (key-value heads).")] = "kv",
    export: Annotated[
        str | None, typer.Option(help="Write the budget of the rule: json, yaml or kvpress.")
    ] = None,
    out: Annotated[
        Path | None, path_option("--out", "New file of the export; stdout when left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Keys each head must keep for an error, and the best split of a total between heads against
    the uniform one.

    For the keep rule you name; without one, the totals of every rule that the run measured. A run
    whose pool is the corpus has one rule: random keys. In a split a language model's heads count by
    how much next tokens feel their errors: the error times the gradient of log p at the head's
    output, which of all weights tried ranks heads best. Where a run has no gradients, as of an
    encoder, relative errors count alike.

    Percentages of the cache are keys kept over keys that the cache holds, summed over layers and
    key-value heads; a sliding-window layer holds at most its window. The uniform split keeps the
    same percentage of every head's cache. Rows are key-value heads: heads that share keys share
    a row; --by head adds what each query head alone would need.

    Example: esscher budget runs/mine --rule heavy --epsilon 0.1 --export json --out heavy.json
    """
    from esscher.probe.budget import RANDOM, find_rule, frontier_of, rule_budget, split_weights
    from esscher.runs import load_run

    _check(by, export, out, as_json)
    stored = load_run(run)
    frontier = frontier_of(stored)
    rule, epsilon, total = (asked.get(name) for name in ("rule", "epsilon", "total"))
    if export == "kvpress" and (epsilon is not None or total is not None):
        raise ValueError(
            "--export kvpress: it holds a split for every share to drop; leave --epsilon and"
            " --total out"
        )
    weights, counted = split_weights(stored, asked.get("weights"))
    about = _about(stored) | {"weights": counted}
    epsilon = ALLOWED if epsilon is None and total is None else epsilon
    several = "frontier" in stored.tables
    if rule is None and export is None and several:
        return _every_rule(
            stored, about, frontier, (epsilon, total), weights, None if as_json else look
        )
    if rule is None and several:
        raise ValueError(
            f"--export: give the rule, one of {', '.join(dict.fromkeys(frontier['rule']))}"
        )
    rule = find_rule(frontier, RANDOM if rule is None else rule)
    if export is not None:
        return _export(stored, about, frontier, (rule, epsilon, total), weights, export, out)
    found = rule_budget(frontier, rule, epsilon, total, weights)
    return _print(about, found, by) if as_json else _show_rule(found, stored, about, by, look)


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


def _about(stored: Run) -> dict[str, Any]:
    """What a budget holds for."""
    from esscher.probe.session import measured_part

    row = stored.table("about").iloc[0]
    found = {"run": str(stored.path), "model": str(row["model"]), "part": measured_part(stored)}
    return {**found, "text": str(row["text"]), "window": int(row["window"])}


def _print(about: dict[str, Any], found: Budget, by: str) -> None:
    """Rows are key-value heads; query heads beside them where they are asked for."""
    names = ("heads", "caches", "totals") if by == "head" else ("caches", "totals")
    tables = {name: getattr(found, name).to_dict("records") for name in names}
    asked = {"rule": found.rule, "epsilon": found.epsilon, "total": found.total}
    print_json({**about, **asked, **tables})


def _asked(epsilon: float | None, total: int | None) -> str:
    return (
        f"for an error of {epsilon:.1%}"
        if epsilon is not None
        else f"in the best split of {total:,}"
    )


def _in_words(totals: pd.DataFrame, epsilon: float | None, total: int | None) -> str:
    """What each split keeps of the cache for an error; of a total, the error that it leaves."""
    rows = totals.to_dict("records")
    if epsilon is not None:
        told = ", ".join(f"{row['split']} {number(row['ratio'], '.1%')}" for row in rows)
        return f"kept of the cache {_asked(epsilon, total)}: {told}"
    told = ", ".join(f"{row['split']} {number(row['error'], '.2%')}" for row in rows)
    return f"error of {total:,} keys in all: {told}"


def _show_rule(found: Budget, stored: Run, about: dict[str, Any], by: str, look: Given) -> None:
    from esscher.probe.budget import BUDGET, per_query

    columns, place = (
        {column.key: column for column in BUDGET},
        "head" if by == "head" else "kv_head",
    )
    rows = (found.heads if by == "head" else found.caches).to_dict("records")
    names = Shown(
        stored.columns("heads")[place].header,
        tuple(f"{row['layer']}.{row[place]}" for row in rows),
        words=True,
    )
    forms: dict[str, Form] = {"keys": ",.1f", "ratio": ".1%", "error": ".1%", "q95": ".1%"}
    more = []
    if found.epsilon is not None and by == "kv":
        more.append(Shown("best split", tuple(number(row["best_split"], ",.1f") for row in rows)))
    reads = " (what a query reads: the cache holds all)" if per_query(found.rule) else ""
    title = f"{found.rule}{reads}, keys {_asked(found.epsilon, found.total)}; {held_for(stored)}"
    say(_in_words(found.totals, found.epsilon, found.total))
    show_table(
        title,
        [names, *(shown(columns[key], rows, form) for key, form in forms.items()), *more],
        look,
    )
    least = (
        f"{found.rule}, these heads together; the best split has the least summed squared relative"
        f" error, {about['weights']}"
    )
    show_splits(found.totals, columns, least, look)


def _every_rule(
    stored: Run,
    about: dict[str, Any],
    frontier: pd.DataFrame,
    asked: tuple[float | None, int | None],
    weights: Weights | None,
    look: Given | None,
) -> None:
    """Totals of all rules: a table in a look, JSON where there is none."""
    from esscher.probe.budget import BUDGET, budget_table

    epsilon, total = asked
    found = budget_table(frontier, [asked], weights)
    if look is None:
        print_json({**about, "epsilon": epsilon, "total": total, "rules": found.to_dict("records")})
        return
    title = (
        f"share of the cache kept {_asked(epsilon, total)}"
        if total is None
        else f"error of {total:,} keys in all"
    )
    columns = {column.key: column for column in BUDGET}
    say(rules_in_words(found))
    show_rules(
        found, columns, f"{title}, by keep rule; {held_for(stored)}; {about['weights']}", look
    )
    say("--rule NAME shows one of them head by head")


def _export(
    stored: Run,
    known: dict[str, Any],
    frontier: pd.DataFrame,
    asked: tuple[str, float | None, int | None],
    weights: Weights | None,
    kind: str,
    out: Path | None,
) -> None:
    from esscher.probe.budget import as_bytes, budget_record, prune_ratios, rule_budget
    from esscher.runs.files import write_durable

    if out is not None and os.path.lexists(out):
        raise ValueError(f"{out}: it exists already; give another name")
    about, (rule, epsilon, total) = stored.table("about").iloc[0], asked
    content: Any
    if kind == "kvpress":
        content = prune_ratios(
            frontier, rule, int(about["layers"]), int(about["kv_heads"]), weights
        )
    else:
        content = budget_record(rule_budget(frontier, rule, epsilon, total, weights), known)
    data = as_bytes(content, kind, "" if out is None else out.suffix)
    if out is None:
        print(data.decode(), end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_durable(out, data)
    log(str(out))
