"""The end of a probe on the terminal: what was found, in words; the table of heads; tails, budgets,
and what failed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from esscher.cli.output import Form, Shown, count, log, number, same_form, say, show_table, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from esscher.runs import Column, Run

L2 = (
    "exponent: that of the L2 error of outputs, of which the rate of [B] does not speak: it is of"
    " their mean and covariance"
)
FORMS: dict[str, Form] = {"coupling": ".3g", "beta_paper": ".4f"}  # others .3f


def show_agreement(run: Run, look: Mapping[str, Any]) -> None:
    """What was measured of the outputs' moments beside what theory says; where nothing was, one
    line that says so.
    """
    columns = run.columns("heads")
    if "beta_mean" not in columns:
        how = " (--moments 100 measures these)" if run.spec.get("pool") == "corpus" else ""
        say(L2 + how)
        return
    heads = run.table("heads").to_dict("records")
    layers = run.table("layers").to_dict("records") if "layers" in run.tables else []
    rows = [*heads, *({"head": "all", **row} for row in layers)]
    place = Shown("head", tuple(f"{row['layer']}.{row['head']}" for row in rows), words=True)
    keys = [key for key, column in columns.items() if column.metric in ("mean", "cov")]
    keys += [key for key, column in columns.items() if column.of] + ["coupling"]
    empty = dict.fromkeys(columns, float("nan"))
    filled = [empty | row for row in rows]
    found = [
        shown(columns[key], filled, FORMS.get(key, ".3f"), gives_way=last)
        for last, key in enumerate(keys)
    ]
    show_table(
        "measured exponents of the outputs' mean and covariance, beside those of theory",
        [place, *found],
        look,
    )
    say(L2 + "; the table above has it")
    if "limits" in run.tables:
        limits = run.table("limits")
        share = (
            f"{limits['share'].median():.0%} of the error at the largest n (median),"
            f" {limits['share'].max():.0%} at most"
        )
        say(
            f"limit of the moments from {int(limits['queries'].max())} sampled queries: its own"
            f" error, taken off, is {share}"
        )
    if "agreement" in run.tables:
        _show_ranks(run, columns, look)


def _show_ranks(run: Run, columns: Mapping[str, Column], look: Mapping[str, Any]) -> None:
    """A prediction a row, a measurement a column."""
    table, rho = run.table("agreement"), run.columns("agreement")["rho"]
    for over, rows in table.groupby("over", sort=False):
        count = int(rows["count"].max())
        predicted = list(dict.fromkeys(rows["predicted"]))
        shows: list[Shown] = [
            Shown("predicted", tuple(columns[key].header for key in predicted), words=True)
        ]
        for key, own in rows.groupby("measured", sort=False):
            cells: list[dict[str, Any]] = (
                own.set_index("predicted").loc[predicted].to_dict("records")
            )
            header = columns[str(key)].header + (
                " (L2)" if columns[str(key)].metric == "l2" else ""
            )
            shows.append(Shown(header, shown(rho, cells, ".2f").cells))
        title = (
            f"rank correlation of predicted and measured exponents over {count} {over}, with its 95"
            " % interval"
        )
        show_table(title, shows, look)


# ---- The tails of the tokens that enter each layer, on the terminal.

# How numbers are written, and which columns give way where there is no room
COLUMNS: dict[str, tuple[Form, int]] = {
    "layer": (".0f", 0),
    "norm_tail": ("", 0),
    "norm_shape": (".2f", 3),
    "norm_sigma": (".2f", 4),
    "coordinate_tail": ("", 0),
    "coordinate_shape": (".2f", 2),
    "coordinate_sigma": (".2f", 5),
}
TITLE = "tokens that enter each layer: the law of their largest norms and coordinates"


def show_tails(run: Run, look: Mapping[str, Any]) -> None:
    """A line for each layer; what first and special tokens change is named."""
    if "layers" not in run.tables:
        return
    layers, columns = run.table("layers"), run.columns("layers")
    if not set(COLUMNS) <= set(columns):  # a run of an older version
        return
    rows = layers.to_dict("records")
    forms = dict(COLUMNS)
    for kind in ("coordinate", "norm"):
        if (layers[f"{kind}_tail"] != layers[f"{kind}_tail_text"]).any():
            forms[f"{kind}_tail_text"] = ("", 1)
    show_table(
        TITLE,
        [shown(columns[key], rows, form, gives_way=last) for key, (form, last) in forms.items()],
        look,
    )


# ---- Totals of keep rules on the terminal: a rule a row, or a split of one rule a row.

Row = dict[str, Any]


def held_for(run: Run) -> str:
    """What totals hold for: the part of the model that was measured, and the text."""
    from esscher.probe.session import measured_part

    about = run.table("about").iloc[0]
    return f"{measured_part(run)}, {about['text']}, windows of {about['window']} tokens"


def show_rules(
    totals: pd.DataFrame,
    columns: Mapping[str, Column],
    title: str,
    look: Mapping[str, Any] | None = None,
) -> None:
    """Every rule with each split: what is kept for an error, or, of a total, the error that is
    left; and what is served worst.

    The best split, the last one, stays where there is no room; the others' worst heads and layers
    go first.
    """
    rules = {str(rule): _by_split(rows) for rule, rows in totals.groupby("rule", sort=False)}
    first = [next(iter(rows.values())) for rows in rules.values()]
    key = "ratio" if math.isfinite(first[0]["epsilon"]) else "error"
    splits = list(dict.fromkeys(totals["split"]))
    shows = [shown(columns["rule"], first), shown(columns["chosen"], first, gives_way=2)]
    for split in splits:
        rows = [found[split] for found in rules.values()]
        values = tuple(row[key] for row in rows)
        gives_way = 1 if split == splits[0] and len(splits) > 2 else 0
        shows.append(
            Shown(
                split,
                tuple(number(value, ".1%") for value in values),
                gives_way=gives_way,
                values=values,
            )
        )
    for order, split in enumerate(splits[::-1]):
        rows = [found[split] for found in rules.values()]
        shows += worst(rows, columns, "" if order == 0 else f" ({split})", gives_way=3 * order)
    show_table(f"{title}; worst head and layer of the {splits[-1]}", shows, look)


def _by_split(rows: pd.DataFrame) -> dict[str, Row]:
    return {str(row["split"]): row for row in rows.to_dict("records")}


def rules_in_words(totals: pd.DataFrame) -> str:
    """The rule that keeps least in its best split, or errs least with a total, and what that split
    serves worst.

    Of rules that drop keys for good, and of those that choose for each query; the floor is no rule
    that one could run.
    """
    from esscher.probe.spec import FLOOR

    best = totals[(totals["split"] == totals["split"].iloc[-1]) & (totals["rule"] != FLOOR)]
    key, does = (
        ("ratio", "keeps least")
        if math.isfinite(best["epsilon"].iloc[0])
        else ("error", "errs least")
    )
    told = []
    for chosen, kind in (
        ("once", "of rules for a cache"),
        ("for each query", "of rules that choose for each query"),
    ):
        known = best[best["chosen"] == chosen]
        if len(known):
            row = known.loc[known[key].idxmin()]
            told.append(
                f"{kind} {row['rule']} {does}, {row[key]:.1%} in its {row['split']} (worst head"
                f" {row['worst_head']} at {row['worst']:.1%}, worst layer {row['worst_layer']} at"
                f" {row['worst_layer_error']:.1%})"
            )
    return "; ".join(told)


def show_splits(
    totals: pd.DataFrame,
    columns: Mapping[str, Column],
    title: str,
    look: Mapping[str, Any] | None = None,
) -> None:
    """Every split of one rule, with the head and the layer that it serves worst."""
    rows = totals.to_dict("records")
    forms: dict[str, tuple[Form, int]] = {
        "split": ("", 0),
        "keys": (",.1f", 1),
        "ratio": (".1%", 0),
        "saved": (".1%", 3),
        "error": (".2%", 0),
        "q95": (".1%", 2),
    }
    found = [shown(columns[key], rows, form, gives_way=last) for key, (form, last) in forms.items()]
    show_table(title, [*found, *worst(rows, columns)], same_form(look))


def worst(
    rows: list[Row], columns: Mapping[str, Column], of: str = "", gives_way: int = 0
) -> Iterator[Shown]:
    """Which head and which layer each row serves worst, with their errors; ``of``: added to the
    headers.
    """
    for last, (name, error) in enumerate(
        (("worst_head", "worst"), ("worst_layer", "worst_layer_error"))
    ):
        if name not in columns:  # a run of an older version
            continue
        values = tuple(row[error] for row in rows)
        cells = tuple(f"{row[name]} {number(row[error], '.1%')}" for row in rows)
        yield Shown(
            columns[name].header + of,
            cells,
            gives_way=gives_way and gives_way + last,
            key=name + of,
            values=values,
        )


# ---- The end of a probe on the terminal: what was found, in words; the table of heads; tails,
# budgets, and what failed.

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
    if "budget" in run.tables:
        for epsilon, rows in run.table("budget").groupby("epsilon"):
            title = (
                f"share of the cache kept for an error of {epsilon:.1%}, by keep rule;"
                f" {held_for(run)}"
            )
            show_rules(rows, run.columns("budget"), title, form)
    heads = run.table("heads")
    fine = heads["status"] == "ok"
    for note, number_of in (
        heads.loc[fine & (heads["reason"] != ""), "reason"].value_counts(sort=False).items()
    ):
        log(f"{number_of} of {len(heads)} heads: {note}")
    for row in heads[~fine].to_dict("records"):
        log(f"layer {row['layer']} head {row['head']}: {row['status']}, {row['reason']}")


def _title(run: Run, look: Look) -> str:
    """Which heads of which model, on what; and how sure it is that they are the model's own."""
    from esscher.probe.session import measured_part

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
    from esscher.errors.more_text import BEYOND

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
