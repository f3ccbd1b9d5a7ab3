"""``esscher budget``: how much of the key-value cache a keep rule needs in a probed model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from esscher.cli.options import All, Json, path_argument, path_option, switch
from esscher.cli.output import close, log, print_json, show
from esscher.probe.spec import ALLOWED

if TYPE_CHECKING:
    import pandas as pd

    from esscher.probe.budget import Budget
    from esscher.runs import Run

RULE = "Eviction rule, e.g. snapkv or sinks:4+recent (default: every rule)."
EPSILON = (
    "Relative error of each head's output to allow, instead of a loss (default:"
    f" {ALLOWED:g} in a model without a language head)."
)
TOTAL = "Keys to split between all key-value heads."
KVPRESS = "New .npy file for kvpress: the best split at every share to drop."
KL = "Predicted loss to allow, in nats per token (default: 0.05 in a language model)."


def budget(
    run: Annotated[Path, path_argument("Run directory of esscher probe.")],
    rule: Annotated[str | None, switch("--rule", RULE)] = None,
    epsilon: Annotated[float | None, switch("--epsilon", EPSILON)] = None,
    total: Annotated[int | None, switch("--total", TOTAL)] = None,
    kl: Annotated[float | None, switch("--kl", KL)] = None,
    kvpress: Annotated[Path | None, path_option("--kvpress", KVPRESS)] = None,
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
    from esscher.report.words import cache_answer
    from esscher.runs import load_run
    from esscher.runs.store import write_durable

    if (epsilon, total, kl) != (None, None, None):
        if kvpress is not None:
            raise ValueError(
                "--kvpress: it holds a split for every share to drop; leave --epsilon, --total and"
                " --kl out"
            )
        budgets.as_asked(epsilon, total, kl)  # a mistake is told before anything is read
    stored = load_run(run)
    if kvpress is not None:
        if kvpress.exists():
            raise ValueError(f"{kvpress}: it exists already; give another name")
        data = io.BytesIO()
        np.save(data, budgets.prune_ratios(stored, rule), allow_pickle=False)
        kvpress.parent.mkdir(parents=True, exist_ok=True)
        write_durable(kvpress, data.getvalue())
        return log(str(kvpress))
    found = budgets.budget(stored, rule, epsilon=epsilon, total=total, kl=kl)
    asked, about = found.asked, stored.table("about").iloc[0]
    tables = {"caches": found.caches, "totals": found.totals}
    compared = found.rules
    if compared is not None:
        tables = {"rules": compared}
    if as_json:
        known = {key: str(about[key]) for key in ("model", "text")}
        known |= {"part": found.part, "rule": found.rule, **asked._asdict()}
        window = int(about["window"])
        return print_json({"run": str(stored.path), "window": window, **known, **tables})
    columns = {column.key: column for column in budgets.BUDGET}
    same = ["epsilon", "kl", "rule", "where", "saved"] if compared is None else []
    for name, table in tables.items() if everything else ():
        show(f"{name} for {asked.words}", table.drop(columns=same, errors="ignore"), columns)
    if compared is None:
        return close(*_rule_answer(found, stored), columns, everything=everything)
    what = f"{about['model']} on {about['text']}, {found.part}"
    answer = cache_answer(stored, what, compared, asked.words, asked.kl, asked.by)
    close(*answer[:4], columns, everything=everything)


def _rule_answer(found: Budget, run: Run) -> tuple[list[str], pd.DataFrame, list[str], str]:
    """What each split of one rule keeps, the keys of each key-value head, the next command."""
    from esscher.probe.budget import BEST, CUT, OWN, UNIFORM, per_query
    from esscher.report.words import compress_command

    asked, reads = found.asked, per_query(found.rule)
    how = {OWN: "with every head at this error", UNIFORM: "if all keep the same share"}
    how |= {CUT: "with one cut", BEST: "in the best split"}
    of = " of them" if reads else " of the cache"
    what = "the cache holds all keys, and each query reads" if reads else "it keeps"
    told = ", ".join(
        f"{row['ratio']:.1%}{of * (i == 0)} {how[row['split']]}"
        + f" (error {row['error']:.1%})" * (asked.epsilon is None)
        for i, row in enumerate(found.totals.to_dict("records"))
    )
    sentence = f"{found.rule} for {asked.words}: {what} {told}; {found.part}."
    hidden = ["heads", "n_keys", *(["best_split"] if asked.epsilon is None else [])]
    rows = found.caches.drop(columns=hidden).sort_values("keys", ascending=False, kind="stable")
    asking = ((name, getattr(asked, name)) for name in ("epsilon", "kl"))
    flag = "".join(f"--{name} {value:g} " for name, value in asking if value is not None)
    following = f"esscher budget {run.path} {flag}--rule {found.rule} --json > budget.json"
    if asked.kl is not None and not reads:
        following = compress_command(run, found.rule, asked.kl)
    return [sentence], rows, list(rows), following
