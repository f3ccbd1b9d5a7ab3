"""The content of a probe's page: every head of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from esscher.report.words import (
    ANY_CACHE,
    BEST,
    FLOOR,
    Grids,
    answer_of,
    columns_of,
    counted,
    demanding,
    described,
    described_table,
    epsilons_of,
    heads_of,
    model_described,
    need_column,
    numbers,
    overview,
    parts_of,
    read_table,
    shortened,
    text_described,
    text_of,
    theory_lines,
    written,
)
from esscher.runs import Run

Places = list[tuple[int, int]]  # layer and head of the rows of a page

LAST = 1 << 30  # place of a column that says nothing of its place
LEAST_LOSS = 1e-4  # nats per token, at the bottom of the chart: less is as good as none
POOLS = {"corpus": "all tokens of the text", "sequence": "a query's own window"}
MORE_TEXT = ("value", "half", "estimate", "low", "high")


def atlas(run: Run) -> dict[str, Any]:
    """Everything the page of a probe shows."""
    about = read_table(run, "about")
    known = {} if about is None else about.iloc[0].to_dict()
    model = text_of(known.get("model")) or model_described(run.spec)
    heads = heads_of(run)
    lines = [*answer_of(run).sentences, _what(run, heads, model, known)]
    content = overview(run, "atlas", model, lines)
    if heads is None:
        content["warnings"].append("There is no head in this run yet, so there is nothing to draw.")
        nothing: dict[str, Any] = {"columns": [], "budget": [], "theory": [], "epsilons": {}}
        nothing |= {"needs": {}, "words": {}, "errors": {}, "rows": {"layer": [], "head": []}}
        return content | nothing
    failed = heads[heads["status"] != "ok"]
    if len(failed):
        told = counted(shortened(text_of(x), 200) or "no reason given" for x in failed["reason"])
        content["warnings"].append(
            f"{len(failed)} of {len(heads)} heads were not measured: {told}. They are hatched on"
            " the map."
        )
    grids, own = Grids(), run.spec.get("pool") == "sequence"
    places = list(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    columns = described(run, "heads", map(str, heads.columns))
    epsilons, changing = epsilons_of(heads), _changing(run)
    curves = _curves(run, grids)
    return content | {
        "columns": sorted(columns, key=lambda column: column.get("first", LAST)),
        "rows": columns_of(heads),
        "epsilons": epsilons,
        "needs": {percent: need_column(heads, percent) for percent in epsilons},
        "identity": _identity(run, known, heads, model),
        "words": {percent: demanding(heads, percent, changing, own=own) for percent in epsilons},
        "curves": [curves.get(place, []) for place in places],
        "wholes": {str(layer): found for (layer, head), found in curves.items() if head == -1},
        "tails": _tails(run, places, grids),
        "budget": _records(run, "budget"),
        "layers": described_table(run, "layers"),
        "theory": theory_lines(run.columns("heads")),
        "errors": _meanings(run, "curves", "metric") if curves else {},
        "losses": _losses(run),
        **_frontier(run, places, grids),
        **_more_text(run, places),
        **_scales(run),
        "grids": grids.lists,
    }


def _what(run: Run, heads: Any | None, model: str, known: dict[str, Any]) -> str:
    """The first line: model, what its weights were where they were not read as they are, text,
    tokens.
    """
    read = text_of(known.get("weights"))
    text = f"{shortened(model)}{f' ({read})' if ', ' in read else ''} on {text_described(run.spec)}"
    if known.get("tokens") and known.get("window"):
        text += f", {written(known['tokens'])} tokens in windows of {written(known['window'])}"
    if heads is None:
        return text
    layers, count = heads["layer"].nunique(), len(heads)
    text += f": {count} head{'s' * (count != 1)} in {layers} layer{'s' * (layers != 1)}"
    measured = heads[heads["status"] == "ok"]
    if measured.empty or "n_keys" not in measured.columns:
        return f"{text}."
    spread = ""
    if {"n_keys_least", "n_keys_most"} <= set(measured.columns):
        least, most = measured["n_keys_least"].min(), measured["n_keys_most"].max()
        if least < most:
            spread = f" (mean over depths, {written(least)} to {written(most)})"
    queries = written(measured["n_queries"].max())
    return f"{text}, {written(measured['n_keys'].max())} keys{spread} and {queries} queries a head."


def _identity(run: Run, known: dict[str, Any], heads: Any, model: str) -> dict[str, Any]:
    """Facts by which a page sets runs beside each other; ``known``: the row of the table about.

    ``weights`` is the same for runs of one model and no others: the digest of its weights, or its
    name where nobody took that. ``pool`` is the same for runs whose queries see the same kind of
    keys, as many of them.
    """
    measured = heads[heads["status"] == "ok"]
    keys = measured["n_keys"].max() if "n_keys" in measured.columns and len(measured) else None
    pool = text_of(known.get("pool")) or text_of(run.spec.get("pool"))
    facts = {
        "model": shortened(model, 120),
        "text": text_described(run.spec),
        "tokens of text": written(known["tokens"]) if known.get("tokens") else "",
        "keys are": POOLS.get(pool, pool),
        "keys a query sees": "" if keys is None else written(keys),
        "heads measured": f"{len(measured)} of {len(heads)}, {heads['layer'].nunique()} layers",
    }
    return {
        "weights": text_of(known.get("model_sha256")) or model,
        "pool": f"{pool} {keys}",
        "facts": [[name, value] for name, value in facts.items() if value],
    }


def _meanings(run: Run, table: str, key: str) -> dict[str, str]:
    """What the words of a column stand for."""
    column = run.columns(table)[key]
    return dict(zip(column.words, column.meanings, strict=False))


def _labels(run: Run, table: str) -> dict[str, str]:
    return {key: column.label for key, column in run.columns(table).items()}


def _records(run: Run, name: str) -> list[dict[str, Any]]:
    """The rows of a table, if there is one."""
    frame = read_table(run, name)
    columns = {} if frame is None else columns_of(frame)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# ---- Tidy tables by head. Lists that repeat are places in the grids.


def _by_head(rows: Iterable[tuple[Any, Any, Any]]) -> dict[tuple[int, int], list[Any]]:
    """Lists by head, from layer, head and an entry of the list."""
    found: dict[tuple[int, int], list[Any]] = {}
    for layer, head, entry in rows:
        found.setdefault((int(layer), int(head)), []).append(entry)
    return found


def _curves(run: Run, grids: Grids) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Error curves by (layer, head)."""
    frame = read_table(run, "curves")
    drawn = {"rms": "rms", "q95": "q95", "stderr": "stderr", "slope": "local_slope"}
    rows = []
    groups = ["layer", "head", "metric", "kind"]
    for (layer, head, metric, kind), part in (
        () if frame is None else parts_of(frame.sort_values("n", kind="stable"), groups)
    ):
        curve = {"metric": str(metric), "kind": str(kind), "n": grids.place(numbers(part["n"]))}
        for key, name in drawn.items():
            values = part.get(name, ())
            if any(value == value and (value or name != "stderr") for value in values):
                curve[key] = numbers(values)
        if "sampling" in part:
            curve["sampling"] = text_of(part["sampling"][0])
        rows.append((layer, head, curve))
    return _by_head(rows)


def _tails(run: Run, places: Places, grids: Grids) -> list[Any]:
    """Survival of each head's scores beside the Gaussian's, None where it has none."""
    frame = read_table(run, "tails")
    if frame is None:
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
    if frame is None:
        return {}
    names = {str(rule): shortened(str(rule), 80) for rule in dict.fromkeys(frame["rule"])}
    return {
        "rules": list(names.values()),
        "labels": _labels(run, "frontier"),
        "floor": FLOOR,
        "frontier": _lines(frame, "rule", "kept", ("relative",), 3, places, grids),
        "totals": [{**row, "rule": names.get(row["rule"], "")} for row in _records(run, "budget")],
    }


def _losses(run: Run) -> dict[str, Any] | None:
    """The predicted loss of the model against the share of the cache, a line for each rule."""
    frame = read_table(run, "nats")
    if frame is None:
        return None
    best = frame[frame["split"] == BEST].sort_values("ratio", kind="stable")
    series = []
    for i, (rule, own) in enumerate(best.groupby("rule", sort=False)):
        where = text_of(own["where"].iloc[0]) if "where" in own else ANY_CACHE
        series.append(
            {
                "label": f"{shortened(str(rule), 60)}{f' ({where})' * (where != ANY_CACHE)}",
                "color": 7 if rule == FLOOR else i % 7,
                "dash": "solid" if where == ANY_CACHE else "dashed",
                "x": numbers(own["ratio"]),
                "y": numbers(own["nats"]),
            }
        )
    return {
        "title": "Predicted loss against the share of the cache kept",
        "note": "Every head keeps what loses least in all (best split). Dashed: rules that need"
        " weights on kept keys, or all keys. Above 0.2 nats the true loss is larger.",
        "x": {"label": "share of the cache kept", "log": True},
        "y": {"label": "loss, nats per token", "log": True, "low": LEAST_LOSS},
        "height": 340,
        "marks": [{"y": 0.05, "label": "0.05", "scaled": True}],
        "series": series,
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
    if frame is None:
        return {}
    labels, bounded = _labels(run, "heads"), _changing(run)[-1:]
    names = ("number", *MORE_TEXT, "status")
    rows = []
    for layer, head, key, *told, status in frame[["layer", "head", *names]].itertuples(index=False):
        values: list[Any] = [float(x) if abs(x) < float("inf") else None for x in told]
        if status in bounded:
            values[MORE_TEXT.index("estimate")] = None
        rows.append((layer, head, [text_of(labels.get(key, key)), *values, text_of(status)]))
    found, words = _by_head(rows), _labels(run, "endless")
    head_line = [words[name] for name in names]
    return {"endless": [found.get(place) for place in places], "endless_labels": head_line}


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
        {**line, "y": numbers(middle[line["key"]])}
        for line in theory_lines(run.columns("scales"))
        if line["key"] in middle.columns
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
