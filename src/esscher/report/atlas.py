"""The content of a probe's page: every head of a model."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from esscher.report.dispersion import dispersion_content
from esscher.report.endless import endless_content, unsettled
from esscher.report.exponents import theory_lines
from esscher.report.frontier import frontier_content
from esscher.report.identity import identity_of
from esscher.report.looks import looks_content
from esscher.report.packing import (
    Grids,
    columns_of,
    numbers,
    parts_of,
    records_of,
    shortened,
    text_of,
)
from esscher.report.reading import described, overview, read_table, settings_line
from esscher.report.scales import scales_content
from esscher.report.words import demanding, model_described, need_column, text_described, written
from esscher.runs import Run

__all__ = ["atlas", "epsilons_of", "heads_of", "is_atlas"]

LAST = 1 << 30  # place of a column that says nothing of its place
_NEEDED = re.compile(r"tokens_needed_(\d+(?:[._]\d+)?)pct")


def is_atlas(run: Run) -> bool:
    """Whether a run describes the heads of a model."""
    return run.manifest.job == "probe"


def heads_of(run: Run) -> Any | None:
    """The heads table in the order of layers and heads; None if there is none or it is empty."""
    heads = read_table(run, "heads")
    if heads is None or heads.empty:
        return None
    return heads.sort_values(["layer", "head"], kind="stable").reset_index(drop=True)


def epsilons_of(heads: Any) -> dict[str, str]:
    """Percentages for which tokens needed were stored -> their columns, smallest error first."""
    found = {
        match.group(1).replace("_", "."): key
        for key in heads.columns
        if (match := _NEEDED.fullmatch(key))
    }
    return dict(sorted(found.items(), key=lambda item: float(item[0])))


def atlas(run: Run) -> dict[str, Any]:
    """Everything the page of a probe shows."""
    about = read_table(run, "about")
    known = {} if about is None or about.empty else about.iloc[0].to_dict()
    model = text_of(known.get("model")) or model_described(run.spec)
    heads = heads_of(run)
    content = overview(run, "atlas", model, [_what(run, heads, model, known), settings_line(run)])
    if heads is None:
        content["warnings"].append("There is no head in this run yet, so there is nothing to draw.")
        return content | {
            "rows": {"layer": [], "head": []},
            "columns": [],
            "epsilons": {},
            "needs": {},
            "words": {},
            "budget": [],
            "theory": [],
            "errors": {},
        }
    content["warnings"] += _incomplete(heads)
    grids, own = Grids(), run.spec.get("pool") == "sequence"
    places = list(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    epsilons, moving = epsilons_of(heads), unsettled(run)
    frame = read_table(run, "curves")
    curves = _curves(frame, grids)
    content |= {
        "columns": sorted(
            described(run, "heads", map(str, heads.columns)),
            key=lambda column: column.get("first", LAST),
        ),
        "rows": columns_of(heads),
        "epsilons": epsilons,
        "needs": {percent: need_column(heads, percent) for percent in epsilons},
        "identity": identity_of(run, known, heads, model),
        "words": {percent: demanding(heads, percent, moving, own=own) for percent in epsilons},
        "curves": [curves.get(place, []) for place in places],
        "wholes": {str(layer): found for (layer, head), found in curves.items() if head == -1},
        "scores": _by_head(read_table(run, "scores"), ("z", "density", "gaussian"), places, grids),
        "tails": _by_head(read_table(run, "tails"), ("z", "survival", "gaussian"), places, grids),
        "budget": records_of(read_table(run, "budget")),
        "layers": _described(run, "layers"),
        "agreement": _agreement(run),
        "theory": [asdict(line) for line in theory_lines(run.columns("heads"))],
        "errors": {} if frame is None else _meanings(run),
        **frontier_content(run, places, grids),
        **dispersion_content(run, places, grids),
        **endless_content(run, places),
        **scales_content(run),
        **looks_content(run, places),
        "grids": grids.lists,
    }
    return content


def _what(run: Run, heads: Any | None, model: str, known: dict[str, Any]) -> str:
    """The first line: model, what its weights were where they were not read as they are, text,
    tokens.
    """
    read = text_of(known.get("weights")) or ""
    text = f"{shortened(model)}{f' ({read})' if ', ' in read else ''} on {text_described(run.spec)}"
    if known.get("tokens") and known.get("window"):
        text += f", {written(known['tokens'])} tokens in windows of {written(known['window'])}"
    if heads is None:
        return text
    layers, count = heads["layer"].nunique(), len(heads)
    measured = heads[heads["status"] == "ok"]
    size = f"{count} head{'s' * (count != 1)} in {layers} layer{'s' * (layers != 1)}"
    if measured.empty or "n_keys" not in measured.columns:
        return f"{text}: {size}."
    keys, queries = (
        measured["n_keys"].max(),
        measured["n_queries"].max() if "n_queries" in measured.columns else float("nan"),
    )
    return (
        f"{text}: {size}, {written(keys)} keys{_spread_of_keys(measured)} and {written(queries)}"
        " queries a head."
    )


def _spread_of_keys(measured: Any) -> str:
    """That the number of keys is a mean, where each query sees its own context."""
    if not {"n_keys_least", "n_keys_most"} <= set(measured.columns):
        return ""
    least, most = measured["n_keys_least"].min(), measured["n_keys_most"].max()
    return f" (mean over depths, {written(least)} to {written(most)})" if least < most else ""


def _incomplete(heads: Any) -> list[str]:
    """Say how many heads were not measured and why; say so too when there is but one."""
    found = []
    failed = heads[heads["status"] != "ok"]
    if len(failed):
        reasons = failed["reason"].map(lambda value: shortened(text_of(value), 200)).value_counts()
        told = "; ".join(
            f"{reason or 'no reason given'} ({count})"
            for reason, count in list(reasons.items())[:3]
        )
        found.append(
            f"{len(failed)} of {len(heads)} heads were not measured: {told}. They are hatched on"
            " the map."
        )
    if len(heads) == 1:
        found.append("This run holds a single head, so there is nothing to compare it with.")
    return found


def _curves(frame: Any | None, grids: Grids) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Curves by (layer, head); arrays that repeat are places in the grids."""
    if frame is None or frame.empty:
        return {}
    optional = [name for name in ("sampling",) if name in frame.columns]
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for (layer, head, metric, kind), part in parts_of(
        frame.sort_values("n", kind="stable"), ["layer", "head", "metric", "kind"]
    ):
        curve: dict[str, Any] = {
            "metric": str(metric),
            "kind": str(kind),
            "n": grids.place(numbers(part["n"])),
        }
        for key, name in (
            ("rms", "rms"),
            ("q95", "q95"),
            ("stderr", "stderr"),
            ("slope", "local_slope"),
        ):
            if name in part and any(
                value == value and (value or name != "stderr") for value in part[name]
            ):
                curve[key] = numbers(part[name])
        curve |= {name: text_of(part[name][0]) for name in optional}
        found.setdefault((int(layer), int(head)), []).append(curve)
    return found


def _by_head(
    frame: Any | None, names: tuple[str, ...], places: list[tuple[int, int]], grids: Grids
) -> list[Any]:
    """Columns of a tidy table for each head, None where it has none; all but the middle one are
    shared.
    """
    if frame is None or frame.empty:
        return []
    found = {}
    for (layer, head), part in parts_of(frame, ["layer", "head"]):
        first, own, last = (numbers(part[name]) for name in names)
        found[int(layer), int(head)] = [grids.place(first), own, grids.place(last)]
    return [found.get(place) for place in places]


def _described(run: Run, name: str) -> dict[str, Any]:
    """A table with its columns explained."""
    frame = read_table(run, name)
    if frame is None or frame.empty:
        return {}
    return {
        "columns": described(run, name, map(str, frame.columns)),
        "rows": columns_of(frame),
        "count": len(frame),
    }


def _agreement(run: Run) -> dict[str, Any]:
    """Rank correlations, their exponents by label instead of by column."""
    found, labels = (
        _described(run, "agreement"),
        {key: column.label for key, column in run.columns("heads").items()},
    )
    for key in ("predicted", "measured"):
        if key in found.get("rows", {}):
            found["rows"][key] = [labels.get(name, name) for name in found["rows"][key]]
    return found


def _meanings(run: Run) -> dict[str, str]:
    """What the names of errors stand for, in unfinished runs too."""
    metric = run.columns("curves")["metric"]
    return dict(zip(metric.words, metric.meanings, strict=False))
