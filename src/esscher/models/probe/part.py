"""Which part of a model a probe measured: its totals hold for that part, and not for the model."""

from __future__ import annotations

from esscher.runs import Run

__all__ = ["measured_part"]


def measured_part(run: Run) -> str:
    """The heads that have numbers, of those that the model has: 27 of 270 heads, 3 of 30 layers."""
    heads, about = run.table("heads"), run.table("about").iloc[0]
    measured = heads[heads["status"] == "ok"]
    layers, found = measured["layer"].nunique(), len(measured)
    if "heads" not in about:  # of each layer; a run of an older version
        return f"{found} heads, {layers} of {int(about['layers'])} layers"
    if found == int(about["layers"]) * int(about["heads"]):
        return f"all {found} heads of the model"
    return (
        f"{found} of {int(about['layers']) * int(about['heads'])} heads, {layers} of"
        f" {int(about['layers'])} layers"
    )
