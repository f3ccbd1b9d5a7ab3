"""Totals of keep rules on the terminal: a rule a row, or a split of one rule a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from esscher.cli.output import number
from esscher.cli.tables import Form, Shown, same_form, show_table, shown

if TYPE_CHECKING:
    import pandas as pd

    from esscher.runs import Column, Run

__all__ = ["held_for", "rules_in_words", "show_rules", "show_splits", "worst"]

Row = dict[str, Any]


def held_for(run: Run) -> str:
    """What totals hold for: the part of the model that was measured, and the text."""
    from esscher.models.probe.part import measured_part

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
    from esscher.models.probe.spec import FLOOR

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
