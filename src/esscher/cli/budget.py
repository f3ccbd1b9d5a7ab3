"""``esscher budget``: how much of the key-value cache a keep rule needs in a probed model."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from esscher.cli.options import All, option
from esscher.cli.output import ROWS, Json, log, path_argument, path_option, print_json, say, show
from esscher.probe.spec import ALLOWED, FLOOR, BudgetFlags

if TYPE_CHECKING:
    import pandas as pd

    from esscher.probe.budget import Asked, Budget

TOTALS = ["rule", "chosen", "ratio", "error", "worst_head", "worst"]
LOSSES = ["rule", "chosen", "uniform", "ratio", "nats", "beyond"]
ENDS = ["nats_low", "nats_high"]
SPLITS = ["split", "keys", "ratio", "error", "worst_head", "worst"]


def budget(
    run: Annotated[Path, path_argument("Run directory of esscher probe.")],
    rule: Annotated[str | None, option(BudgetFlags, "rule", default="every rule")] = None,
    epsilon: Annotated[float | None, option(BudgetFlags, "epsilon", default=f"{ALLOWED:g}")] = None,
    total: Annotated[int | None, option(BudgetFlags, "total")] = None,
    kl: Annotated[float | None, option(BudgetFlags, "kl")] = None,
    kvpress: Annotated[
        Path | None,
        path_option("--kvpress", "New .npy file for kvpress: a split for every share to drop."),
    ] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Keys each head must keep for an error or a loss in nats, and the best split of a total.

    For the keep rule you name; without one, the totals of every rule that the run measured. A run
    whose pool is the corpus has one rule: random keys.

    --kl: the fewest keys whose predicted KL divergence of next tokens is at most that, in nats per
    token, all heads together. It holds for the text that was probed: for queries after the cache
    was cut, which did not choose the keys. Above 0.2 nats the loss is larger than predicted.

    Percentages of the cache are keys kept over keys that the cache holds, summed over layers and
    key-value heads; a sliding-window layer holds at most its window. Splits: uniform keeps the same
    percentage of every head's cache; one cut keeps the keys above one score; best split has the
    least predicted loss, or the least squared relative error where --epsilon is given or the run
    has no losses. Rows are key-value heads: heads that share keys share a row.

    Example: esscher budget runs/mine --kl 0.05
    """
    import numpy as np

    from esscher.probe import budget as budgets
    from esscher.probe.session import measured_part
    from esscher.runs import load_run
    from esscher.runs.store import write_durable

    nothing = epsilon is None and total is None and kl is None
    asked = budgets.as_asked(ALLOWED if nothing else epsilon, total, kl)
    if kvpress is not None and not nothing:
        raise ValueError(
            "--kvpress: it holds a split for every share to drop; leave --epsilon, --total and --kl"
            " out"
        )
    if kvpress is not None and os.path.lexists(kvpress):
        raise ValueError(f"{kvpress}: it exists already; give another name")
    stored = load_run(run)
    frontier, known = budgets.frontier_of(stored, asked), stored.table("about").iloc[0]
    about = {
        "run": str(stored.path),
        "model": str(known["model"]),
        "part": measured_part(stored),
        "text": str(known["text"]),
        "window": int(known["window"]),
    }
    if rule is None and "frontier" in stored.tables:
        if kvpress is not None:
            names = ", ".join(dict.fromkeys(frontier["rule"]))
            raise ValueError(f"--kvpress: give the rule, one of {names}")
        totals = budgets.budget_table(frontier, [asked])
        if as_json:
            return print_json({**about, **asked._asdict(), "rules": totals.to_dict("records")})
        return _show_rules(totals, about, asked, everything)
    rule = budgets.find_rule(frontier, budgets.RANDOM if rule is None else rule)
    if kvpress is not None:
        data = io.BytesIO()
        size = int(known["layers"]), int(known["kv_heads"])
        np.save(data, budgets.prune_ratios(frontier, rule, *size), allow_pickle=False)
        kvpress.parent.mkdir(parents=True, exist_ok=True)
        write_durable(kvpress, data.getvalue())
        return log(str(kvpress))
    found = budgets.rule_budget(frontier, rule, *asked)
    if as_json:
        tables = {name: getattr(found, name).to_dict("records") for name in ("caches", "totals")}
        return print_json({**about, "rule": found.rule, **asked._asdict(), **tables})
    _show_rule(found, about, everything)


def _columns() -> dict[str, Any]:
    from esscher.probe.budget import BUDGET, SHARE
    from esscher.runs.columns import Column

    uniform = Column("uniform", "float", "share, uniform", SHARE, short="uniform")
    return {column.key: column for column in (*BUDGET, uniform)}


def _show_rules(
    totals: pd.DataFrame, about: Mapping[str, Any], asked: Asked, everything: bool
) -> None:
    """The smallest cache, or the least error, by rules that one could run; then every rule."""
    from esscher.probe.budget import BEST, UNIFORM

    key = "error" if asked.total is not None else "ratio"
    uniform = totals[totals["split"] == UNIFORM].set_index("rule")["ratio"]
    best = totals[totals["split"] == BEST]
    best = best.assign(uniform=best["rule"].map(uniform))
    once = best[(best["chosen"] == "once") & (best["rule"] != FLOOR)]
    if len(once):
        row = once.loc[once[key].idxmin()]
        loss = (
            f"an error of {row['error']:.1%} (worst head {row['worst_head']}: {row['worst']:.1%})"
        )
        if asked.kl is not None:
            loss = (
                f"a predicted KL of {row['nats']:.3g} nats per token; uniform {row['uniform']:.1%}"
            )
            if row["nats"] < 0.9 * asked.kl:
                loss += "; the smallest sizes measured lose less than that: smaller ones may do"
        say(
            f"For {asked.words}: {row['rule']} keeps {row['ratio']:.1%} of the cache in its best"
            f" split, at {loss}; {about['part']}, {about['text']}."
        )
    if everything:
        show(f"keep rules for {asked.words}", totals, _columns())
    else:
        ordered = best.sort_values(["chosen", key], ascending=[False, True])
        shown = TOTALS if asked.kl is None else LOSSES + ENDS
        show(f"keep rules for {asked.words}, best split", ordered[shown], _columns(), ROWS)
    say(f"Next: esscher budget {about['run']} {_flag(asked)}--rule NAME, for the keys of each head")


def _flag(asked: Asked) -> str:
    return "" if asked.kl is None else f"--kl {asked.kl:g} "


def _show_rule(found: Budget, about: Mapping[str, Any], everything: bool) -> None:
    """What each split keeps, then the caches of one rule."""
    from esscher.probe.budget import per_query

    asked = found.asked
    told = ", ".join(
        f"{row['split']} {row['ratio']:.1%} at an error of {row['error']:.1%}"
        for row in found.totals.to_dict("records")
    )
    reads = " (what a query reads: the cache holds all)" if per_query(found.rule) else ""
    say(f"{found.rule}{reads} for {asked.words} keeps of the cache: {told}.")
    rows = found.caches.drop(columns=["heads", "n_keys"])
    if asked.epsilon is None:
        rows = rows.drop(columns="best_split")
    rows = rows.sort_values("keys", ascending=False, kind="stable")
    title = f"keys of each kv head; {about['part']}, {about['text']}"
    show(title, rows, _columns(), None if everything else ROWS)
    if everything:
        losses = [key for key in ("nats", *ENDS, "beyond") if key in found.totals]
        show("splits", found.totals[SPLITS + losses], _columns())
    command = f"esscher budget {about['run']} {_flag(asked)}--rule {found.rule} --json"
    say(f"Next: {command} > budget.json, for the keys of every head as a file")
