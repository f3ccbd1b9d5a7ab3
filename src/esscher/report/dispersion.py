"""How far the heads of a probe spread as keys are added, as its page and figures show it: curves by
their origin.
"""

from __future__ import annotations

from typing import Any

from esscher.report.packing import Grids, numbers, parts_of
from esscher.report.reading import read_table
from esscher.report.style import PALETTE
from esscher.runs import Run

__all__ = ["dispersion_content", "draw_dispersion"]

SHOWN = ("effective_tokens", "largest_weight", "planted_weight")
DIGITS = 4
POSITION = "position"  # the origin whose rows are queries, not expectations


def dispersion_content(run: Run, places: list[tuple[int, int]], grids: Grids) -> dict[str, Any]:
    """Origins by name and meaning, and each head's curves in their order: n, then what is shown;
    empty where not measured.
    """
    frame = read_table(run, "dispersion")
    if frame is None or frame.empty:
        return {}
    origins = [str(origin) for origin in dict.fromkeys(frame["origin"])]
    curves: dict[tuple[int, int], list[Any]] = {}
    for (layer, head, origin), part in parts_of(frame, ["layer", "head", "origin"]):
        own = curves.setdefault((int(layer), int(head)), [None] * len(origins))
        own[origins.index(str(origin))] = [
            grids.place(numbers(part["n"])),
            *(numbers(part[name], DIGITS) for name in SHOWN),
        ]
    columns = run.columns("dispersion")
    said = dict(zip(columns["origin"].words, columns["origin"].meanings, strict=False))
    return {
        "origins": [[origin, said.get(origin, origin), origin == POSITION] for origin in origins],
        "spread_labels": [columns[name].label for name in ("n", *SHOWN)],
        "dispersion": [curves.get(place) for place in places],
    }


def draw_dispersion(run: Run, layer: int, head: int, ax: Any) -> Any:
    """Effective tokens of one head against n, log-log: expectations as lines, queries as they stand
    as points.
    """
    columns = run.columns("dispersion")
    names = {
        axis: columns[key].label
        for axis, key in (("xlabel", "n"), ("ylabel", SHOWN[0]))
        if key in columns
    }
    ax.set(xscale="log", yscale="log", title=f"layer {layer}, head {head}", **names)
    frame = read_table(run, "dispersion")
    own = None if frame is None else frame[(frame["layer"] == layer) & (frame["head"] == head)]
    if own is None or own.empty:
        ax.text(
            0.5, 0.5, "no dispersion was stored", ha="center", va="center", transform=ax.transAxes
        )
        return ax
    said = columns["origin"]
    labels = dict(zip(said.words, said.meanings, strict=False))
    for i, (origin, part) in enumerate(own.groupby("origin", sort=False)):
        style = {"marker": "o", "ms": 3, "ls": ""} if origin == POSITION else {"lw": 1.4}
        part = part.sort_values("n")
        ax.plot(
            part["n"],
            part["effective_tokens"],
            color=PALETTE[i],
            label=labels.get(origin, str(origin)),
            **style,
        )
    ends = [own["n"].min(), own["n"].max()]
    ax.plot(ends, ends, color=PALETTE[6], lw=0.8, ls=":", label="uniform: n")
    ax.legend(loc="upper left")
    return ax
