"""The content of pages for runs of the in-context-learning lab: training, and concentration with
the prompt length.
"""

from __future__ import annotations

from typing import Any

from esscher.report.packing import numbers, shortened
from esscher.report.reading import read_table
from esscher.report.sweep import charts_page
from esscher.runs import Run

__all__ = ["icl_page", "is_icl"]

MODELS = {"softmax": 0, "linear": 1}
DASHES = ("solid", "dashed", "dotted", "dashdot")
AGAINST = {"linear": "from linear attention", "limit": "from infinitely many tokens"}
METRICS = {f"gradient_{part}": f"gradient in {part}" for part in "UVKQ"} | {
    "risk_gradient": "gradient of the risk"
}
PROMPT = {"label": "prompt length L", "log": True}


def is_icl(run: Run) -> bool:
    """Whether a run belongs to the in-context-learning lab."""
    return run.manifest.job.startswith("icl")


def icl_page(run: Run) -> dict[str, Any]:
    """Charts by what the run measured, then its tables."""
    charts = [*_risks(run), *_training(run), *_concentration(run)]
    noise, dim = run.spec.get("noise"), run.spec.get("dim")
    told = (
        f" in dimension {dim} with label noise {noise:g}"
        if isinstance(noise, float) and dim is not None
        else ""
    )
    line = f"Softmax against linear attention on linear regression in context{told}."
    title = str(
        run.spec.get("title")
        or {"icl-train": "In-context learning: training"}.get(
            run.manifest.job, "In-context learning"
        )
    )
    return charts_page(run, title, line, charts, first=["final", "rates"])


def _risks(run: Run) -> list[dict[str, Any]]:
    """Risk at the end of training against the prompt length, a point per seed."""
    final = read_table(run, "final")
    if final is None or not {"model", "mse", "length"} <= set(final.columns):
        return []
    charts = []
    for covariance, own in _by(final, "covariance"):
        series = []
        for model, part in own.sort_values("length").groupby("model", sort=False):
            points = {"x": numbers(part["length"]), "y": numbers(part["mse"])}
            if "stderr" in part.columns:
                points |= {
                    "low": numbers(part["mse"] - 2 * part["stderr"]),
                    "high": numbers(part["mse"] + 2 * part["stderr"]),
                }
            series.append(
                {
                    "label": str(model),
                    "mode": "points",
                    "color": MODELS.get(str(model), 2),
                    **points,
                }
            )
        y = {"label": run.columns("final")["mse"].label, "log": True}
        note = "A point per seed, with two standard errors."
        charts.append(
            {
                "title": _titled("Risk after training", covariance),
                "note": note,
                "x": PROMPT,
                "y": y,
                "series": series,
            }
        )
    return charts


def _training(run: Run) -> list[dict[str, Any]]:
    """Risk, and the distance between the two models, along training; means over seeds."""
    charts = []
    for name, column in (("curve", "mse"), ("distance", "distance2")):
        frame = read_table(run, name)
        if frame is None or not {"step", column, "length"} <= set(frame.columns):
            continue
        frame = frame[frame["step"] > 0]
        lengths = sorted(set(frame["length"]))
        for covariance, own in _by(frame, "covariance"):
            series = []
            for keys, part in own.groupby(
                [*(["model"] if "model" in own.columns else []), "length"], sort=False
            ):
                model, length = keys if len(keys) == 2 else ("models", keys[0])
                mean = part.groupby("step")[column].mean()
                style = {
                    "color": MODELS.get(str(model), 2),
                    "dash": DASHES[lengths.index(length) % len(DASHES)],
                }
                series.append(
                    {
                        "label": f"{model}, L = {length}",
                        "x": numbers(mean.index),
                        "y": numbers(mean),
                        **style,
                    }
                )
            title = "Risk along training" if name == "curve" else "Distance between the two models"
            x, y = (
                {"label": "step", "log": True},
                {"label": run.columns(name)[column].label, "log": True},
            )
            charts.append(
                {
                    "title": _titled(title, covariance),
                    "note": "Means over seeds.",
                    "x": x,
                    "y": y,
                    "series": series,
                }
            )
    return charts


def _concentration(run: Run) -> list[dict[str, Any]]:
    """Error of output and gradients against the prompt length, with the fitted exponents in the
    legend.
    """
    curves, rates = read_table(run, "curves"), read_table(run, "rates")
    if curves is None or not {"n", "rms", "metric", "against", "covariance"} <= set(curves.columns):
        return []
    keys = ["covariance", "against", "metric"]
    fitted = (
        {}
        if rates is None
        else {tuple(row[key] for key in keys): row["exponent"] for row in rates.to_dict("records")}
    )
    charts = []
    for metric, own in curves.groupby("metric", sort=False):
        series = []
        for i, ((covariance, against), part) in enumerate(
            own.groupby(["covariance", "against"], sort=False)
        ):
            exponent = fitted.get((covariance, against, metric), float("nan"))
            told = f", exponent {exponent:.2f}" if exponent == exponent else ""
            label = f"{covariance}, {AGAINST.get(str(against), str(against))}{told}"
            entry: dict[str, Any] = {"label": shortened(label), "mode": "points", "color": i % 6}
            entry |= {"x": numbers(part["n"]), "y": numbers(part["rms"])}
            if "stderr" in part.columns and part["stderr"].any():
                entry["low"], entry["high"] = (
                    numbers(part["rms"] + sign * 2 * part["stderr"]) for sign in (-1, 1)
                )
            series.append(entry)
        name, y = (
            METRICS.get(str(metric), str(metric)),
            {"label": run.columns("curves")["rms"].label, "log": True},
        )
        charts.append(
            {"title": f"Concentration: {name}", "note": "", "x": PROMPT, "y": y, "series": series}
        )
    return charts


def _by(frame: Any, column: str) -> list[tuple[str, Any]]:
    if column not in frame.columns:
        return [("", frame)]
    return [(str(key), part) for key, part in frame.groupby(column, sort=False)]


def _titled(title: str, covariance: str) -> str:
    return f"{title} ({shortened(covariance, 40)})" if covariance else title
