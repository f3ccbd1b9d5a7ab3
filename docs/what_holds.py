"""The page "What holds", made from reproduce.json when the documentation is built: a section and a picture for each claim."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DATA = Path(__file__).with_name("reproduce.json")
VERDICTS = ("supported", "refuted", "undecided")


def write_page(folder: Path) -> None:
    """``what_holds.md`` with its pictures in a folder."""
    content = json.loads(DATA.read_text("utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for claim in content["claims"]:
        if claim.get("picture"):
            save_picture(claim, folder / f"{claim['id']}.svg")
    (folder / "what_holds.md").write_text(page(content), "utf-8")


def page(content: Mapping[str, Any]) -> str:
    claims = content["claims"]
    counts = ", ".join(f"{sum(claim['verdict'] == word for claim in claims)} {word}" for word in VERDICTS)
    seen = sum(bool(claim["seen"]) for claim in claims)
    hours = sum(claim["seconds"] for claim in claims) / 3600
    lines = [
        "# What holds",
        "",
        f"{len(claims)} claims, of the papers and of our own: {counts}. Each was decided by a rule that was",
        "tried on data where the claim is false ({doc}`../reproduce`).",
        f"**{seen} of the {len(claims)} are no blind tests**: measurements of their own had been seen when their rule or",
        "settings were fixed, and of some the rule was chosen after them; each says what (*Seen before*).",
        "Only one seed is shown. This page is made from the file that",
        f"`esscher reproduce --all --{content['scale']}` wrote, seed {content['seed']}, {content['written'][:10]};",
        f"its runs took {hours:.1f} hours. Intervals are 99.9 % unless the rule says otherwise.",
        "",
        "| claim | statement | verdict | effect |",
        "|---|---|---|---|",
    ]
    lines += [f"| [{c['id']}](#{c['id']}) | {text(c['statement'])} | {c['verdict']} | {text(effect(c))} |" for c in claims]
    for claim in claims:
        lines += section(claim)
    return "\n".join(lines) + "\n"


def section(claim: Mapping[str, Any]) -> list[str]:
    lines = ["", f"({claim['id']})=", f"## {claim['id']}: {claim['verdict']}", "", text(claim["statement"]), ""]
    told = {
        "Source": text(claim["source"]),
        "Under": text(claim["hypothesis"]),
        "Rule": text(claim["rule"]),
        "Refuted by": text(claim["refuted_by"]),
        "Seen before": text(claim["seen"]) or "nothing of its own measurements.",
        "Found": f"{text(effect(claim))}; {text(claim['reason'])}.",
        "Again": f"`{claim['command']}`, {claim['seconds']:.0f} s.",
    }
    lines += [f"- {name}: {words}" for name, words in told.items()]
    if claim.get("picture"):
        lines += ["", f"![{text(claim['statement'])}]({claim['id']}.svg)"]
    return lines


def effect(claim: Mapping[str, Any]) -> str:
    if claim["value"] is None:
        return str(claim["effect"])
    ends = "" if claim["low"] is None or claim["high"] is None else f" [{claim['low']:.3g}, {claim['high']:.3g}]"
    return f"{claim['effect']} {claim['value']:.3g}{ends}"


def text(words: str) -> str:
    """As it stands, not read as markup."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>$|#" else c for c in words)


def save_picture(claim: Mapping[str, Any], file: Path) -> None:
    picture = claim["picture"]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for series in picture["series"]:
        x, y = numbers(series["x"]), numbers(series["y"])
        if series["line"]:
            axes.plot(x, y, "--", label=series["label"])
            continue
        [points] = axes.plot(x, y, "o", markersize=4, label=series["label"])
        if series["low"] is not None:
            axes.vlines(x, numbers(series["low"]), numbers(series["high"]), colors=points.get_color(), linewidth=1)
    axes.set_xlabel(picture["x"])
    axes.set_ylabel(picture["y"])
    axes.set_xscale("log" if "x" in picture["log"] else "linear")
    axes.set_yscale("log" if "y" in picture["log"] else "linear")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(file)
    plt.close(figure)


def numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
