"""Predicted beside measured on the terminal: exponents of the outputs' moments, those of theory,
and how their ranks agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from esscher.cli.tables import Form, Shown, say, show_table, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from esscher.runs import Column, Run

__all__ = ["show_agreement"]

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
