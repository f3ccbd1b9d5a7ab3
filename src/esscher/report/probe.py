"""The content of a probe's page: every head of a model. Tables go to the page as they are stored,
tidy ones by head; its scripts make pictures of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esscher.report import words
from esscher.report.charts import chart_of, kept_text, series_of
from esscher.report.words import (
    columns_of,
    described_table,
    numbers,
    read_table,
    shortened,
    text_of,
    theory_lines,
    written,
)
from esscher.runs import Run

LAST = 1 << 30  # place of a column that says nothing of its place
LEAST_LOSS = 1e-4  # nats per token, at the bottom of the chart: less is as good as none
POOLS = {"corpus": "all tokens of the text", "sequence": "a query's own window"}
# tidy tables with rows of each head: columns that name a part of them, columns that are drawn
TIDY = {
    "curves": (("metric", "kind"), ("n", "rms", "q95", "stderr", "local_slope")),
    "tails": ((), ("z", "survival", "gaussian")),
    "frontier": (("rule",), ("kept", "relative")),
    "endless": (("number", "status"), ("value", "half", "estimate", "low", "high")),
}


def atlas(run: Run) -> dict[str, Any]:
    """Everything the page of a probe shows."""
    about = read_table(run, "about")
    known = {} if about is None else about.iloc[0].to_dict()
    model = text_of(known.get("model")) or words.model_name(run)
    heads = words.heads_of(run)
    facts = _facts(run, known, heads, model)
    line = "; ".join(f"{name}: {fact}" for name, fact in facts.items())
    content = words.overview(run, "atlas", model, [*words.answer_of(run).sentences, line])
    content |= {"columns": [], "rows": {"layer": [], "head": []}, "epsilons": {}, "needs": {}}
    if heads is None:
        content["warnings"].append("There is no head in this run yet, so there is nothing to draw.")
        return content
    failed = heads[heads["status"] != "ok"]
    if len(failed):
        told = words.counted(
            shortened(text_of(x), 200) or "no reason given" for x in failed["reason"]
        )
        content["warnings"].append(
            f"{len(failed)} of {len(heads)} heads were not measured: {told}. They are hatched on"
            " the map."
        )
    columns = words.described(run, "heads", map(str, heads.columns))
    tidy = {name: by_head(run, name, *TIDY[name]) for name in TIDY}
    places = list(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    labels = {name: run.columns(name) for name in TIDY if tidy[name]}
    scales, budget = read_table(run, "scales"), read_table(run, "budget")
    epsilons = words.epsilons_of(heads)
    if budget is not None:
        budget["rule"] = [shortened(str(rule), 80) for rule in budget["rule"]]
    metrics = labels["curves"]["metric"] if tidy["curves"] else None
    return content | {
        "columns": sorted(columns, key=lambda column: column.get("first", LAST)),
        "rows": columns_of(heads),
        "epsilons": epsilons,
        "needs": {percent: words.need_column(heads, percent) for percent in epsilons},
        "identity": {
            "weights": text_of(known.get("model_sha256")) or model,
            "pool": facts.get("keys a query sees", ""),
            "facts": list(facts.items()),
        },
        **{name: [found.get(place) for place in places] for name, found in tidy.items() if found},
        "wholes": {layer: own for (layer, head), own in tidy["curves"].items() if head == -1},
        "labels": {
            name: {key: column.label for key, column in own.items()} for name, own in labels.items()
        },
        "errors": dict(zip(metrics.words, metrics.meanings, strict=False)) if metrics else {},
        "bounded": labels["endless"]["status"].words[-1:] if tidy["endless"] else (),
        "rules": [part["rule"] for part in next(iter(tidy["frontier"].values()), ())],
        "floor": words.FLOOR,
        "budget": {} if budget is None else columns_of(budget),
        "layers": described_table(run, "layers"),
        "theory": theory_lines(run.columns("heads")),
        "losses": _losses(run),
        "kept": kept_text(run),
        "scales": None
        if scales is None
        else {
            "rows": columns_of(scales),
            "theory": theory_lines(run.columns("scales")),
            "help": run.columns("scales")["beta_fit"].help,
        },
    }


def _facts(run: Run, known: dict[str, Any], heads: Any | None, model: str) -> dict[str, str]:
    """What was measured, by name; ``known``: the row of the table about."""
    facts = {"model": shortened(model, 120), "text": words.text_described(run.spec)}
    if known.get("tokens"):
        facts["tokens"] = written(known["tokens"])
        if known.get("window"):
            facts["tokens"] += f" in windows of {written(known['window'])}"
    if heads is None:
        return facts
    measured = heads[heads["status"] == "ok"]
    layers = heads["layer"].nunique()
    facts["heads"] = f"{len(measured)} of {len(heads)}, {layers} layer{'s' * (layers != 1)}"
    if "n_keys" in measured and len(measured):
        pool = text_of(known.get("pool")) or text_of(run.spec.get("pool"))
        told = POOLS.get(pool, pool)
        if {"n_keys_least", "n_keys_most"} <= set(measured.columns):
            least, most = measured["n_keys_least"].min(), measured["n_keys_most"].max()
            if least < most:
                told += f", mean over positions, {written(least)} to {written(most)}"
        facts["keys a query sees"] = written(measured["n_keys"].max()) + f" ({told})" * bool(told)
        facts["queries per head"] = written(measured["n_queries"].max())
    return facts


def by_head(
    run: Run, name: str, by: Sequence[str], drawn: Sequence[str]
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The rows of a tidy table by layer and head: for each of their parts the words that name it
    and the columns that are drawn, as lists. A column without a number is left out.
    """
    frame = read_table(run, name)
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    if frame is None:
        return found
    if "n" in frame:
        frame = frame.sort_values("n", kind="stable")
    arrays = {key: frame[key].to_numpy() for key in drawn if key in frame}
    groups = frame.groupby(["layer", "head", *by], sort=False).indices.items()
    for (layer, head, *names), rows in sorted(groups, key=lambda group: group[1][0]):
        part: dict[str, Any] = dict(zip(by, (shortened(str(x), 80) for x in names), strict=True))
        for key, values in arrays.items():
            own = numbers(values[rows])
            if any(value is not None for value in own):
                part[key] = own
        found.setdefault((int(layer), int(head)), []).append(part)
    return found


def _losses(run: Run) -> dict[str, Any] | None:
    """The predicted loss of the model against the share of the cache, a line for each rule."""
    frame = read_table(run, "nats")
    if frame is None:
        return None
    best = frame[frame["split"] == words.BEST].sort_values("ratio", kind="stable")
    series = []
    for i, (rule, own) in enumerate(best.groupby("rule", sort=False)):
        where = text_of(own["where"].iloc[0]) if "where" in own else words.ANY_CACHE
        told = "" if where == words.ANY_CACHE else f" ({where})"
        again = "dashdot" if i >= 7 else "solid"  # seven colours go round
        style = {"dash": "dashed" if told else again}
        place = 7 if rule == words.FLOOR else i % 7
        label = f"{shortened(str(rule), 60)}{told}"
        series.append(series_of(label, own[["ratio", "nats"]], "ratio", "nats", place, **style))
    note = (
        "Keys are split between heads for the least total loss (best split). Dashed: rules that"
        " need weights for kept keys, or all keys. Above 0.2 nats the true loss is larger."
    )
    x, y = "share of the cache kept", "loss, nats per token"
    title = "Predicted loss against the share of the cache kept"
    mark = {"y": 0.05, "label": "0.05", "scaled": True}
    return chart_of(title, x, y, series, note, low=LEAST_LOSS) | {"height": 340, "marks": [mark]}
