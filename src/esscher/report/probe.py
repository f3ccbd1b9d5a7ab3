"""The content of a probe's page: every head of a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from esscher.report.words import (
    Grids,
    columns_of,
    counted,
    demanding,
    described,
    described_table,
    epsilons_of,
    heads_of,
    identity_of,
    model_described,
    need_column,
    number,
    numbers,
    overview,
    parts_of,
    read_table,
    records_of,
    shortened,
    text_described,
    text_of,
    theory_lines,
    written,
)
from esscher.runs import Run

Places = list[tuple[int, int]]  # layer and head of the rows of a page

FLOOR = "neyman"  # the rule that no other goes below, to first order: drawn dashed
LAST = 1 << 30  # place of a column that says nothing of its place
SPREAD = ("effective_tokens", "largest_weight", "planted_weight")  # that are drawn against n
MORE_TEXT = ("value", "half", "estimate", "low", "high")
TEXTS = {
    who: [f"{who}_{part}" for part in ("before", "token", "after")] for who in ("query", "key")
}


def atlas(run: Run) -> dict[str, Any]:
    """Everything the page of a probe shows."""
    about = read_table(run, "about")
    known = {} if about is None or about.empty else about.iloc[0].to_dict()
    model = text_of(known.get("model")) or model_described(run.spec)
    heads = heads_of(run)
    content = overview(run, "atlas", model, [_what(run, heads, model, known)])
    if heads is None:
        content["warnings"].append("There is no head in this run yet, so there is nothing to draw.")
        nothing: dict[str, Any] = {"columns": [], "budget": [], "theory": [], "epsilons": {}}
        nothing |= {"needs": {}, "words": {}, "errors": {}, "rows": {"layer": [], "head": []}}
        return content | nothing
    content["warnings"] += _incomplete(heads)
    grids, own = Grids(), run.spec.get("pool") == "sequence"
    places = list(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    columns = described(run, "heads", map(str, heads.columns))
    epsilons, changing = epsilons_of(heads), _changing(run)
    frame = read_table(run, "curves")
    curves = _curves(frame, grids)
    return content | {
        "columns": sorted(columns, key=lambda column: column.get("first", LAST)),
        "rows": columns_of(heads),
        "epsilons": epsilons,
        "needs": {percent: need_column(heads, percent) for percent in epsilons},
        "identity": identity_of(run, known, heads, model),
        "words": {percent: demanding(heads, percent, changing, own=own) for percent in epsilons},
        "curves": [curves.get(place, []) for place in places],
        "wholes": {str(layer): found for (layer, head), found in curves.items() if head == -1},
        "tails": _tails(run, places, grids),
        "budget": records_of(read_table(run, "budget")),
        "layers": described_table(run, "layers"),
        "agreement": _agreement(run),
        "theory": [asdict(line) for line in theory_lines(run.columns("heads"))],
        "errors": {} if frame is None else _meanings(run, "curves", "metric"),
        **_frontier(run, places, grids),
        **_dispersion(run, places, grids),
        **_more_text(run, places),
        **_scales(run),
        **_looks(run, places),
        "grids": grids.lists,
    }


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
    queries = measured["n_queries"].max() if "n_queries" in measured.columns else float("nan")
    spread = ""
    if {"n_keys_least", "n_keys_most"} <= set(measured.columns):
        least, most = measured["n_keys_least"].min(), measured["n_keys_most"].max()
        if least < most:
            spread = f" (mean over depths, {written(least)} to {written(most)})"
    return (
        f"{text}: {size}, {written(measured['n_keys'].max())} keys{spread} and {written(queries)}"
        " queries a head."
    )


def _incomplete(heads: Any) -> list[str]:
    """How many heads were not measured and why; and whether there is but one."""
    found = []
    failed = heads[heads["status"] != "ok"]
    if len(failed):
        reasons = (shortened(text_of(value), 200) for value in failed["reason"])
        told = counted(reason or "no reason given" for reason in reasons)
        found.append(
            f"{len(failed)} of {len(heads)} heads were not measured: {told}. They are hatched on"
            " the map."
        )
    if len(heads) == 1:
        found.append("This run holds a single head, so there is nothing to compare it with.")
    return found


def _meanings(run: Run, table: str, key: str) -> dict[str, str]:
    """What the words of a column stand for."""
    column = run.columns(table)[key]
    return dict(zip(column.words, column.meanings, strict=False))


def _agreement(run: Run) -> dict[str, Any]:
    """Rank correlations, their exponents by label instead of by column."""
    found = described_table(run, "agreement")
    labels = {key: column.label for key, column in run.columns("heads").items()}
    for key in ("predicted", "measured"):
        if key in found.get("rows", {}):
            found["rows"][key] = [labels.get(name, name) for name in found["rows"][key]]
    return found


# ---- Tidy tables by head. Lists that repeat are places in the grids.


def _curves(frame: Any | None, grids: Grids) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Error curves by (layer, head)."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    if frame is None or frame.empty:
        return found
    drawn = {"rms": "rms", "q95": "q95", "stderr": "stderr", "slope": "local_slope"}
    keys = ["layer", "head", "metric", "kind"]
    for (layer, head, metric, kind), part in parts_of(frame.sort_values("n", kind="stable"), keys):
        curve = {"metric": str(metric), "kind": str(kind), "n": grids.place(numbers(part["n"]))}
        for key, name in drawn.items():
            values = part.get(name, ())
            if any(value == value and (value or name != "stderr") for value in values):
                curve[key] = numbers(values)
        if "sampling" in part:
            curve["sampling"] = text_of(part["sampling"][0])
        found.setdefault((int(layer), int(head)), []).append(curve)
    return found


def _tails(run: Run, places: Places, grids: Grids) -> list[Any]:
    """Survival of each head's scores beside the Gaussian's, None where it has none."""
    frame = read_table(run, "tails")
    if frame is None or frame.empty:
        return []
    found = {}
    for (layer, head), part in parts_of(frame, ["layer", "head"]):
        z, own, gaussian = (numbers(part[name]) for name in ("z", "survival", "gaussian"))
        found[int(layer), int(head)] = [grids.place(z), own, grids.place(gaussian)]
    return [found.get(place) for place in places]


def _lines(
    frame: Any, by: str, x: str, ys: tuple[str, ...], digits: int, places: Places, grids: Grids
) -> list[Any]:
    """For each head a line for every word of a column, in their order: x, then the ys."""
    words = list(dict.fromkeys(map(str, frame[by])))
    found: dict[tuple[int, int], list[Any]] = {}
    for (layer, head, word), part in parts_of(frame, ["layer", "head", by]):
        own = found.setdefault((int(layer), int(head)), [None] * len(words))
        drawn = (numbers(part[name], digits) for name in ys)
        own[words.index(str(word))] = [grids.place(numbers(part[x])), *drawn]
    return [found.get(place) for place in places]


def _frontier(run: Run, places: Places, grids: Grids) -> dict[str, Any]:
    """Keep rules by name, each head's error against keys kept, and the totals of every rule."""
    frame = read_table(run, "frontier")
    if frame is None or frame.empty:
        return {}
    names = {str(rule): shortened(str(rule), 80) for rule in dict.fromkeys(frame["rule"])}
    totals = records_of(read_table(run, "budget"))
    return {
        "rules": list(names.values()),
        "labels": {key: column.label for key, column in run.columns("frontier").items()},
        "floor": FLOOR,
        "frontier": _lines(frame, "rule", "kept", ("relative",), 3, places, grids),
        "totals": [{**row, "rule": names.get(row["rule"], "")} for row in totals],
    }


def _dispersion(run: Run, places: Places, grids: Grids) -> dict[str, Any]:
    """Effective tokens and largest weights of each head against n, by where keys come from."""
    frame = read_table(run, "dispersion")
    if frame is None or frame.empty:
        return {}
    columns, said = run.columns("dispersion"), _meanings(run, "dispersion", "origin")
    origins = dict.fromkeys(map(str, frame["origin"]))
    return {
        "origins": [said.get(origin, origin) for origin in origins],
        "spread_labels": [columns[name].label for name in ("n", *SPREAD)],
        "dispersion": _lines(frame, "origin", "n", SPREAD, 4, places, grids),
    }


def _changing(run: Run) -> tuple[str, ...]:
    """The words of numbers that more text may change: all but the first, the best one."""
    return () if read_table(run, "endless") is None else run.columns("endless")["status"].words[1:]


def _more_text(run: Run, places: Places) -> dict[str, Any]:
    """Of each head, rows of label, MORE_TEXT and status: whether its numbers hold on more text.

    The last of the statuses is that of a number with a bound at best: what is stored as its
    estimate is not to be trusted.
    """
    frame = read_table(run, "endless")
    if frame is None or frame.empty:
        return {}
    columns, bounded = run.columns("heads"), _changing(run)[-1:]
    names = ("number", *MORE_TEXT, "status")
    found: dict[tuple[int, int], list[Any]] = {}
    for (layer, head), part in parts_of(frame, ["layer", "head"]):
        rows = found.setdefault((int(layer), int(head)), [])
        for key, *told, status in zip(*(part[name] for name in names), strict=True):
            values: list[Any] = [float(x) if abs(x) < float("inf") else None for x in told]
            if status in bounded:
                values[MORE_TEXT.index("estimate")] = None
            label = columns[key].label if key in columns else key
            rows.append([text_of(label), *values, text_of(status)])
    words = {key: column.label for key, column in run.columns("endless").items()}
    head_line = [words[name] for name in names]
    return {"endless": [found.get(place) for place in places], "endless_labels": head_line}


def _looks(run: Run, places: Places) -> dict[str, Any]:
    """Of each head a list of queries: the place of its text, and of each key the place of its text,
    weight and distance.
    """
    frame = read_table(run, "looks")
    if frame is None or frame.empty:
        return {}
    texts: dict[tuple[str, ...], int] = {}

    def placed(part: dict[str, list[Any]], who: str) -> list[int]:
        rows = zip(*(part[name] for name in TEXTS[who]), strict=True)
        cut = (tuple(shortened(text_of(text), 120) for text in row) for row in rows)
        return [texts.setdefault(row, len(texts)) for row in cut]

    found: dict[tuple[int, int], list[Any]] = {}
    frame = frame.sort_values(["query", "rank"], kind="stable")
    for (layer, head, _), part in parts_of(frame, ["layer", "head", "query"]):
        asks, *_ = placed(part, "query")
        keys = zip(placed(part, "key"), part["weight"], part["distance"], strict=True)
        own = [[place, number(weight, 3), int(distance)] for place, weight, distance in keys]
        found.setdefault((int(layer), int(head)), []).append([asks, own])
    return {
        "looks": [found.get(place) for place in places],
        "looks_texts": [list(text) for text in texts],
    }


def _scales(run: Run) -> dict[str, Any]:
    """Exponents of heads whose scores were multiplied, and at each scale the medians of what was
    measured and of what theory says.
    """
    frame = read_table(run, "scales")
    if frame is None or frame.empty:
        return {}
    frame = frame.assign(squared=frame["scale"] ** 2)
    middle = frame.groupby("squared", as_index=False).median(numeric_only=True)
    theory = [
        {**asdict(line), "y": numbers(middle[line.key])}
        for line in theory_lines(run.columns("scales"))
        if line.key in middle.columns
    ]
    names = ("layer", "head", "beta_fit", "beta_low", "beta_high", "squared")
    return {
        "scales": {
            "points": {name: numbers(frame[name]) for name in names},
            "squared": numbers(middle["squared"]),
            "median": numbers(middle["beta_fit"]),
            "theory": theory,
            "help": text_of(run.columns("scales")["beta_fit"].help),
        }
    }
