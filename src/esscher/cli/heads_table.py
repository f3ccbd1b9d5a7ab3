"""The end of a probe on the terminal: what was found, in words; the table of heads; tails, budgets,
and what failed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from esscher.cli.agreement import show_agreement
from esscher.cli.layer_tails import show_tails
from esscher.cli.output import log, number
from esscher.cli.rule_totals import held_for, show_rules, worst
from esscher.cli.tables import Form, Shown, count, same_form, say, show_table, shown

if TYPE_CHECKING:
    import pandas as pd

    from esscher.runs import Column, Run

__all__ = ["show_heads", "show_totals"]

Look = Mapping[str, Any]

# The columns of the table of heads, how their numbers are written, and which give way where there
# is no room: those of own contexts stand last, where a keep rule says what a head needs
HEADS: tuple[tuple[str, Form, int], ...] = (
    ("regime", "", 0),
    ("kind", "", 0),
    ("cache_kept_10pct", count, 0),
    ("cache_rule_10pct", "", 1),
    ("beta_fit", ".3f", 0),
    ("beta_sharp", ".3f", 5),
    ("tokens_needed_10pct", count, 0),
    ("settled", "", 4),
    ("effective_tokens", count, 3),
    ("khat", ".2f", 6),
    ("sink_mass", ".1%", 7),
    ("sink_token", "", 11),
    ("horizon2", ".3g", 8),
    ("coupling", ".3g", 2),
)
DRAWS_LAST = 9  # draws from an own context go first where a rule says what is kept of it
NAMED = 3  # heads that the summary names
PERCENT = "10"


def show_heads(run: Run, look: Look) -> None:
    """What was found, in words; the table of a probe, its budget, and what failed."""
    for sentence in _summary(run):
        say(sentence)
    show_table(_title(run, look), _columns(run, look), look)
    form = same_form(look)
    show_agreement(run, form)
    show_tails(run, form)
    if "rule_budget" in run.tables:  # random keys are one of the rules
        for epsilon, rows in run.table("rule_budget").groupby("epsilon"):
            title = (
                f"share of the cache kept for an error of {epsilon:.1%}, by keep rule;"
                f" {held_for(run)}"
            )
            show_rules(rows, run.columns("rule_budget"), title, form)
    elif "budget" in run.tables:
        show_totals(run.table("budget"), run.columns("budget"), form, f"; {held_for(run)}")
    heads = run.table("heads")
    fine = heads["status"] == "ok"
    for note, number_of in (
        heads.loc[fine & (heads["reason"] != ""), "reason"].value_counts(sort=False).items()
    ):
        log(f"{number_of} of {len(heads)} heads: {note}")
    for row in heads[~fine].to_dict("records"):
        log(f"layer {row['layer']} head {row['head']}: {row['status']}, {row['reason']}")


def show_totals(
    totals: pd.DataFrame, columns: Mapping[str, Column], look: Look, holds_for: str = ""
) -> None:
    """Cache to keep where keys are kept at random, under each split between heads."""
    rows = totals.to_dict("records")
    error = Shown(
        "total error", tuple(number(math.sqrt(row["squared_error"]), ".2%") for row in rows)
    )
    forms: dict[str, tuple[Form, int]] = {
        "rule": ("", 0),
        "epsilon": (".1%", 0),
        "tokens": (count, 1),
    }
    forms |= {"ratio": (".1%", 0), "saved": (".1%", 2)}
    rule, asked, *rest = (
        shown(columns[key], rows, form, gives_way=last) for key, (form, last) in forms.items()
    )
    shows = [rule, asked, error, *rest, *worst(rows, columns)]
    show_table(f"key-value cache, keys kept at random{holds_for}", shows, same_form(look))


def _title(run: Run, look: Look) -> str:
    """Which heads of which model, on what; and how sure it is that they are the model's own."""
    from esscher.models.probe.part import measured_part

    heads, about = run.table("heads"), run.table("about").iloc[0]
    seen = heads["n_keys"].max()
    pool = (
        f"{about['keys']} keys"
        if about["pool"] == "corpus"
        else f"queries that see {seen} keys of their own window"
    )
    title = (
        f"{about['model']}, {measured_part(run)}, {pool} of {about['text']}; captured"
        f" {about['captured_layers']} of {about['layers']} layers, parity"
        f" {number(about['parity'], '.1e')}"
    )
    if about["pool"] == "sequence":
        title += (
            ", limits differ from the model's own outputs by"
            f" {number(about['output_difference'], '.1e')}"
        )
    return f"{title}; most demanding first" if _by_demand(look) else title


def _by_demand(look: Look) -> bool:
    """Whether rows stand in the order of what heads need: where some are asked for, and no other
    order.
    """
    return bool(look.get("top")) and not look.get("sort")


def _columns(run: Run, look: Look) -> list[Shown]:
    from esscher.report.words import need_column, ranked_heads

    heads, columns = run.table("heads"), run.columns("heads")
    if _by_demand(look):
        order = ranked_heads(heads, need_column(heads, PERCENT)).index[::-1]
        heads = heads.loc[[*order, *heads.index.difference(order)]]
    rows, ruled = heads.to_dict("records"), "rule_keys" in columns
    found = [Shown("head", tuple(f"{row['layer']}.{row['head']}" for row in rows), words=True)]
    for key, form, last in HEADS:
        if key not in columns:
            continue
        own = shown(
            columns[key],
            rows,
            form,
            gives_way=DRAWS_LAST if ruled and key.startswith("tokens_needed") else last,
        )
        found.append(_out_of(own, rows) if ruled and key.startswith("cache_kept") else own)
    return found


def _out_of(kept: Shown, rows: Sequence[Mapping[str, Any]]) -> Shown:
    """Kept keys, of those that a query sees."""
    cells = (
        f"{cell} of {count(row['rule_keys'])}" if cell != "-" else cell
        for cell, row in zip(kept.cells, rows, strict=True)
    )
    return Shown(
        "kept for 10 %", tuple(cells), gives_way=kept.gives_way, key=kept.key, values=kept.values
    )


# ---- in words
# ------------------------------------------------------------------------------------------


def _summary(run: Run) -> Iterator[str]:
    """Regimes and kinds, who needs most and least, whether the numbers stay, and what to do."""
    heads, columns = run.table("heads"), run.columns("heads")
    measured, own = heads[heads["status"] == "ok"], run.spec.get("pool") == "sequence"
    if measured.empty:
        yield f"None of {len(heads)} heads could be measured."
        return
    for key in ("regime", "kind"):
        if key in columns and (told := _counted(measured[key], columns[key])):
            yield f"{columns[key].label.capitalize()}: {told}."
    yield _demands(measured, own=own)
    if "settled" in columns:
        yield _settled(measured["settled"], columns["settled"].words, own=own)
    yield _advice(measured, own=own)


def _counted(words: pd.Series, column: Column) -> str:
    """How many heads have each word of a column, in the column's order, with its meaning where it
    has one.
    """
    found, meanings = Counter(words), dict(zip(column.words, column.meanings, strict=False))
    parts = [
        f"{found[word]} {word}" + (f" ({meanings[word]})" if word in meanings else "")
        for word in column.words
        if found[word]
    ]
    return ", ".join(parts)


def _demands(measured: pd.DataFrame, *, own: bool) -> str:
    """The heads that need most, and the one that needs least."""
    from esscher.report.words import need, need_column, ranked_heads

    rows = ranked_heads(measured, need_column(measured, PERCENT)).to_dict("records")
    told = [f"{row['layer']}.{row['head']} ({need(row, PERCENT, own=own)})" for row in rows]
    if len(told) == 1:
        return f"Needed for an error of {PERCENT} %: {told[0]}."
    most = ", ".join(told[:0:-1][:NAMED])
    return f"Most needed for an error of {PERCENT} %: {most}; least: {told[0]}."


def _settled(settled: pd.Series, words: Sequence[str], *, own: bool) -> str:
    """How many heads have numbers that would stay if the text went on; ``words``: those of the
    column, in their order.
    """
    counted = settled.value_counts()
    parts = ", ".join(f"{counted[word]} {word}" for word in words if word in counted)
    if own:
        return (
            f"Numbers of heads over other windows of such text: {parts}. Brackets: 90 % intervals."
        )
    return (
        f"Numbers of heads if the text went on: {parts}. Brackets: 90 % intervals for an endless"
        " text of this kind."
    )


def _advice(measured: pd.DataFrame, *, own: bool) -> str:
    """What to do with it."""
    from esscher.convergence.endless import BEYOND

    if "cache_rule_10pct" in measured:
        best = Counter(
            measured["cache_rule_10pct"][measured["cache_kept_10pct"].notna()]
        ).most_common(1)
        if not best:
            return (
                "What to do: no rule that drops keys for good reaches 10 %; allow more (--epsilon),"
                " or try other --rules."
            )
        rule, heads = best[0]
        return (
            f"What to do: {rule} drops most keys in {heads} of {len(measured)} heads; esscher"
            f" budget RUN --rule {rule} says how many each head keeps."
        )
    if own:
        return (
            "What to do: no keep rule was compared; leave --rules out to see how many keys each"
            " head must keep."
        )
    beyond = "settled" in measured and bool((measured["settled"] == BEYOND).any())
    more = "read more text (--max-tokens) until numbers settle; " if beyond else ""
    return f"What to do: {more}--pool sequence says which keys of its own context each query needs."
