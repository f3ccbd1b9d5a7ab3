"""The content of a probe's page: every head of a model."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from typing import Any

from esscher.report.style import PALETTE, SCALE
from esscher.report.words import (
    Grids,
    columns_of,
    demanding,
    described,
    identity_of,
    model_described,
    need_column,
    number,
    numbers,
    overview,
    parts_of,
    read_table,
    records_of,
    settings_line,
    shortened,
    text_described,
    text_of,
    theory_lines,
    written,
)
from esscher.runs import Run

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


# ---- How settled the numbers of a probe are.

NUMBERS = ("value", "half", "estimate", "low", "high")


def unsettled(run: Run) -> tuple[str, ...]:
    """The words of numbers that more text may change, as the run's column has them: all but the
    first, the best one.
    """
    return () if read_table(run, "endless") is None else run.columns("endless")["status"].words[1:]


def endless_content(run: Run, places: list[tuple[int, int]]) -> dict[str, Any]:
    """Of each head a row of numbers: label, NUMBERS, status; nothing where it was not measured.

    The last of the statuses is that of a number with a bound at best: what is stored as its
    estimate is not to be trusted.
    """
    frame = read_table(run, "endless")
    if frame is None or frame.empty:
        return {}
    columns, bounded = run.columns("heads"), unsettled(run)[-1:]
    labels = {
        key: columns[key].label if key in columns else key for key in dict.fromkeys(frame["number"])
    }
    found: dict[tuple[int, int], list[Any]] = {}
    for (layer, head), part in parts_of(frame, ["layer", "head"]):
        found[int(layer), int(head)] = [
            [text_of(labels[number]), *_known(told, status in bounded), text_of(status)]
            for number, *told, status in zip(
                *(part[name] for name in ("number", *NUMBERS, "status")), strict=True
            )
        ]
    words = {key: column.label for key, column in run.columns("endless").items()}
    head = [words[name] for name in ("number", *NUMBERS, "status")]
    return {"endless": [found.get(place) for place in places], "endless_labels": head}


def _known(told: list[float], bounded: bool) -> list[float | None]:
    """NUMBERS, None for what is missing."""
    return [
        x if math.isfinite(x) and not (bounded and name == "estimate") else None
        for name, x in zip(NUMBERS, told, strict=True)
    ]


# ---- What keep rules cost the heads of a probe, as its page shows it: the curves of every head,
# and the totals of every rule.

FLOOR = "neyman"  # the rule that no other goes below, to first order: drawn dashed
LONGEST = 80  # characters of a rule's name
FRONTIER_DIGITS = 3  # of an error on a curve; a head has a dozen of them for each of ten rules


def frontier_content(run: Run, places: list[tuple[int, int]], grids: Grids) -> dict[str, Any]:
    """Rules by name, each head's curves in their order (keys kept, errors), and totals; nothing
    where none was measured.
    """
    frame = read_table(run, "frontier")
    if frame is None or frame.empty:
        return {}
    totals = records_of(read_table(run, "budget"))
    names = {str(rule): shortened(str(rule), LONGEST) for rule in dict.fromkeys(frame["rule"])}
    rules = list(names)
    curves: dict[tuple[int, int], list[Any]] = {}
    for (layer, head, rule), part in parts_of(frame, ["layer", "head", "rule"]):
        own = curves.setdefault((int(layer), int(head)), [None] * len(rules))
        own[rules.index(str(rule))] = [
            grids.place(numbers(part["kept"])),
            numbers(part["relative"], FRONTIER_DIGITS),
        ]
    return {
        "rules": list(names.values()),
        "labels": {key: column.label for key, column in run.columns("frontier").items()},
        "floor": FLOOR,
        "frontier": [curves.get(place) for place in places],
        "totals": [{**row, "rule": names.get(row["rule"], "")} for row in totals],
    }


# ---- Which tokens the heads of a probe look at, as its page shows it: texts once, heads by the
# places of texts.

LOOKS_DIGITS = 3  # of a weight
LOOKS_LONGEST = 120  # characters of a text, whoever stored it
ASKS, LOOKED_AT = (
    tuple(f"{who}_{what}" for what in ("before", "token", "after")) for who in ("query", "key")
)


def looks_content(run: Run, places: list[tuple[int, int]]) -> dict[str, Any]:
    """Of each head a list of queries: the place of its text, and of each key the place of its text,
    weight and distance.
    """
    frame = read_table(run, "looks")
    if frame is None or frame.empty:
        return {}
    texts: dict[tuple[str, ...], int] = {}
    found: dict[tuple[int, int], list[Any]] = {}
    for (layer, head, _), part in parts_of(
        frame.sort_values(["query", "rank"], kind="stable"), ["layer", "head", "query"]
    ):
        asks, *_ = _placed(part, ASKS, texts)
        keys = zip(_placed(part, LOOKED_AT, texts), part["weight"], part["distance"], strict=True)
        own = [
            asks,
            [
                [place, number(weight, LOOKS_DIGITS), int(distance)]
                for place, weight, distance in keys
            ],
        ]
        found.setdefault((int(layer), int(head)), []).append(own)
    return {
        "looks": [found.get(place) for place in places],
        "looks_texts": [list(text) for text in texts],
    }


def _placed(
    part: dict[str, list[Any]], names: tuple[str, ...], texts: dict[tuple[str, ...], int]
) -> list[int]:
    """Where the texts of these columns stand; new ones are added."""
    rows = zip(
        *([shortened(text_of(text), LOOKS_LONGEST) for text in part[name]] for name in names),
        strict=True,
    )
    return [texts.setdefault(row, len(texts)) for row in rows]


# ---- Exponents of heads whose scores were multiplied, against the squared factor, as a page and
# figures show them.

MEASURED = "median of the heads"
TOP = 0.6  # of the axis of exponents, at least


def scales_content(run: Run) -> dict[str, Any]:
    """Points of heads and, at each scale, the medians over the heads of what was measured and of
    what theory says.
    """
    frame, every = _measured(run), read_table(run, "scales")
    if frame is None or every is None:
        return {}
    middle, lines = _medians(frame), theory_lines(run.columns("scales"))
    theory = [
        {
            "label": line.label,
            "dash": line.dash,
            "color": line.color,
            "y": numbers(middle[line.key]),
        }
        for line in lines
        if line.key in middle.columns
    ]
    points = {
        name: numbers(frame[name])
        for name in ("layer", "head", "beta_fit", "beta_low", "beta_high")
    }
    return {
        "scales": {
            "points": {**points, "squared": numbers(frame["squared"])},
            "squared": numbers(middle["squared"]),
            "median": numbers(middle["beta_fit"]),
            "theory": theory,
            "refused": len(every) - len(frame),
            "help": text_of(run.columns("scales")["beta_fit"].help),
        }
    }


def draw_scales(run: Run, ax: Any) -> Any:
    """Exponents against the squared factor: heads as points, medians as lines."""
    ax.set(xscale="log", xlabel="squared scale α²", ylabel="exponent", ylim=(0.0, TOP))
    ax.axhline(0.5, color=PALETTE[6], lw=0.8, ls=":")
    frame = _measured(run)
    if frame is None:
        ax.text(0.5, 0.5, "no scale was measured", ha="center", va="center", transform=ax.transAxes)
        return ax
    ax.scatter(
        frame["squared"],
        frame["beta_fit"],
        c=frame["layer"],
        cmap=SCALE,
        s=9,
        zorder=3,
        label="a head (dark: early layer)",
    )
    middle = _medians(frame)
    ax.plot(middle["squared"], middle["beta_fit"], color=PALETTE[0], lw=1.4, label=MEASURED)
    for line in theory_lines(run.columns("scales")):
        ax.plot(
            middle["squared"],
            middle[line.key],
            color=PALETTE[line.color],
            ls=line.dash,
            lw=1.0,
            label=line.label,
        )
    drawn = [frame["beta_fit"], *(middle[line.key] for line in theory_lines(run.columns("scales")))]
    low, high = min(part.min() for part in drawn), max(part.max() for part in drawn)
    ax.set_ylim(min(0.0, 1.1 * low), max(TOP, 1.1 * high))  # every point is in the picture
    # points and lines take the whole height
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2))
    return ax


def _measured(run: Run) -> Any | None:
    """The rows of scales that were measured, with the squared scale; None where there is none."""
    frame = read_table(run, "scales")
    if frame is None or not (frame["status"] == "ok").any():
        return None
    frame = frame[frame["status"] == "ok"]
    return frame.assign(squared=frame["scale"] ** 2)


def _medians(frame: Any) -> Any:
    return frame.groupby("squared", as_index=False).median(numeric_only=True)


# ---- The content of a probe's page: every head of a model.

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
