"""``esscher budget``: how much of the key-value cache a keep rule needs in a probed model."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from esscher.cli.options import All, option
from esscher.cli.output import Json, close, log, path_argument, path_option, print_json, show
from esscher.probe.spec import ALLOWED, BudgetFlags

if TYPE_CHECKING:
    import pandas as pd

    from esscher.probe.budget import Asked, Budget
    from esscher.runs import Run

ENDS = ["nats_low", "nats_high"]
SPLITS = ["split", "keys", "ratio", "error", "worst_head", "worst"]


def budget(
    run: Annotated[Path, path_argument("Run directory of esscher probe.")],
    rule: Annotated[str | None, option(BudgetFlags, "rule", default="every rule")] = None,
    epsilon: Annotated[
        float | None, option(BudgetFlags, "epsilon", default=f"{ALLOWED:g} where there is no loss")
    ] = None,
    total: Annotated[int | None, option(BudgetFlags, "total")] = None,
    kl: Annotated[
        float | None, option(BudgetFlags, "kl", default="0.05 in a language model")
    ] = None,
    kvpress: Annotated[
        Path | None,
        path_option("--kvpress", "New .npy file for kvpress: a split for every share to drop."),
    ] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Show how small the KV cache of a probed model can be, by every rule, and what that loses.

    Without --rule every rule that the run measured is compared and one is recommended. With --rule
    the keys of each key-value head are printed.

    The loss is the predicted KL divergence of next tokens from the full model, in nats per token,
    on the text that was probed. Above 0.2 nats the true loss is larger than predicted.

    The share of the cache is keys kept over keys held, over all layers and key-value heads. Splits:
    uniform (every head keeps the same share), one cut (keys above one score), best split (least
    predicted loss, or least squared error with --epsilon).

    Example: esscher budget runs/mine --kl 0.05
    """
    import numpy as np

    from esscher.probe import budget as budgets
    from esscher.runs import load_run
    from esscher.runs.store import write_durable

    nothing = epsilon is None and total is None and kl is None
    if kvpress is not None and not nothing:
        raise ValueError(
            "--kvpress: it holds a split for every share to drop; leave --epsilon, --total and --kl"
            " out"
        )
    if kvpress is not None and os.path.lexists(kvpress):
        raise ValueError(f"{kvpress}: it exists already; give another name")
    if not nothing:
        budgets.as_asked(epsilon, total, kl)  # a mistake is told before anything is read
    stored = load_run(run)
    if kvpress is not None:
        frontier = budgets.frontier_of(stored, budgets.Asked(ALLOWED))
        names = list(dict.fromkeys(frontier["rule"]))
        if rule is None and len(names) > 1:
            raise ValueError(f"--kvpress: give the rule, one of {', '.join(names)}")
        named = budgets.find_rule(frontier, rule or names[0])
        known = stored.table("about").iloc[0]
        ratios = budgets.prune_ratios(frontier, named, int(known["layers"]), int(known["kv_heads"]))
        data = io.BytesIO()
        np.save(data, ratios, allow_pickle=False)
        kvpress.parent.mkdir(parents=True, exist_ok=True)
        write_durable(kvpress, data.getvalue())
        return log(str(kvpress))
    found = budgets.budget(stored, rule, epsilon=epsilon, total=total, kl=kl)
    compared = found.rules if "frontier" in stored.tables else None
    if as_json:
        known = stored.table("about").iloc[0]
        about = {
            "run": str(stored.path),
            "model": str(known["model"]),
            "part": found.part,
            "text": str(known["text"]),
            "window": int(known["window"]),
        }
        tables: dict[str, Any] = {"rule": found.rule, **found.asked._asdict()}
        if compared is not None:
            tables = {**found.asked._asdict(), "rules": compared}
        else:
            tables |= {"caches": found.caches, "totals": found.totals}
        return print_json(
            about
            | {
                name: value.to_dict("records") if hasattr(value, "to_dict") else value
                for name, value in tables.items()
            }
        )
    if compared is None:
        return _show_rule(found, stored, everything)
    _show_rules(compared, found, stored, everything)


def _columns() -> dict[str, Any]:
    from esscher.probe.budget import BUDGET, SHARE
    from esscher.runs.columns import Column

    uniform = Column("uniform", "float", "share, uniform", SHARE, short="uniform")
    return {column.key: column for column in (*BUDGET, uniform)}


def _show_rules(totals: pd.DataFrame, found: Budget, run: Run, everything: bool) -> None:
    """One recommendation, every rule, and the command that builds the cache."""
    from esscher.report.words import (
        cache_rows,
        cache_sentence,
        compress_command,
        recommended,
        short_columns,
    )

    asked = found.asked
    rows = cache_rows(totals, "ratio" if asked.total is None else "error")
    best, about = recommended(rows), run.table("about").iloc[0]
    what = f"{about['model']} on {about['text']}, {found.part}"
    sentences = [f"{what}: no rule that was measured runs on any cache."]
    following = f"esscher budget {run.path} --rule {found.rule}"
    if best is not None:
        sentences = [cache_sentence(best, what, asked.words)]
        if asked.kl is not None:
            following = compress_command(run, best["rule"], asked.kl)
            if best["nats"] < 0.9 * asked.kl:
                sentences.append("Smaller sizes were not measured and may do.")
            if best["beyond"]:
                sentences.append("A loss above 0.2 nats is larger than predicted.")
    if everything:
        show(f"rules for {asked.words}", totals, _columns())
    close(
        sentences,
        None if everything else rows,
        short_columns(rows, "budget"),
        _columns(),
        following,
    )


def _show_rule(found: Budget, run: Run, everything: bool) -> None:
    """What each split keeps, then the caches of one rule."""
    from esscher.probe.budget import per_query
    from esscher.report.words import compress_command

    asked = found.asked
    told = ", ".join(
        f"{row['split']} {row['ratio']:.1%} at an error of {row['error']:.1%}"
        for row in found.totals.to_dict("records")
    )
    reads = " (what a query reads: the cache holds all)" if per_query(found.rule) else ""
    rows = found.caches.drop(columns=["heads", "n_keys"])
    if asked.epsilon is None:
        rows = rows.drop(columns="best_split")
    rows = rows.sort_values("keys", ascending=False, kind="stable")
    if everything:
        show("key-value heads", rows, _columns())
        losses = [key for key in ("nats", *ENDS, "beyond") if key in found.totals]
        show("splits", found.totals[SPLITS + losses], _columns())
    following = f"esscher budget {run.path} {_flag(asked)}--rule {found.rule} --json > budget.json"
    if asked.kl is not None and not reads:
        following = compress_command(run, found.rule, asked.kl)
    sentence = f"{found.rule}{reads} for {asked.words} keeps of the cache: {told}; {found.part}."
    close([sentence], None if everything else rows, list(rows), _columns(), following)


def _flag(asked: Asked) -> str:
    return "" if asked.epsilon is None else f"--epsilon {asked.epsilon:g} "
