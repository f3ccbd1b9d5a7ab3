"""Totals of keep rules on the terminal: a rule a row, or a split of one rule a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from esscher.cli.output import number
from esscher.cli.tables import Form, Shown, show_table, shown

if TYPE_CHECKING:
    import pandas as pd

    from esscher.runs import Column

__all__ = ["show_rules", "show_splits", "where"]


def where(about: Mapping[str, Any]) -> str:
    """What totals hold for, from what a run says about itself."""
    return f"{about['text']}, windows of {about['window']} tokens"


def show_rules(totals: pd.DataFrame, columns: Mapping[str, Column], title: str) -> None:
    """Every rule with each split: what is kept for an error, or, of a total, the error that is left."""
    rules = {str(rule): rows.to_dict("records") for rule, rows in totals.groupby("rule", sort=False)}
    first = [rows[0] for rows in rules.values()]
    key = "ratio" if math.isfinite(first[0]["epsilon"]) else "error"
    splits = [
        Shown(split, tuple(number(value, ".1%") for value in _of(rules.values(), split, key)))
        for split in dict.fromkeys(totals["split"])
    ]
    worst = _worst([rows[-1] for rows in rules.values()], f"its {columns['worst_head'].header}")
    show_table(title, [*(shown(columns[key], first) for key in ("rule", "chosen")), *splits, worst])


def _of(rules: Iterable[list[dict[str, Any]]], split: str, key: str) -> list[float]:
    return [next((float(row[key]) for row in rows if row["split"] == split), math.nan) for rows in rules]


def show_splits(totals: pd.DataFrame, columns: Mapping[str, Column], title: str) -> None:
    """Every split of one rule, with the head that it serves worst."""
    rows = totals.to_dict("records")
    forms: dict[str, Form] = {"split": "", "keys": ",.1f", "ratio": ".1%", "saved": ".1%", "error": ".2%", "q95": ".1%"}
    show_table(
        title, [*(shown(columns[key], rows, form) for key, form in forms.items()), _worst(rows, columns["worst_head"].header)]
    )


def _worst(rows: list[dict[str, Any]], header: str) -> Shown:
    return Shown(header, tuple(f"{row['worst_head']} {number(row['worst'], '.1%')}" for row in rows))
