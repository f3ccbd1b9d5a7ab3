"""The page "What holds", made from reproduce.json when the documentation is built: a section and a
picture for each claim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from esscher.papers.claim import VERDICTS

HERE = Path(__file__).parent
SHOWN = HERE / "reproduce.json"  # of the full run
QUICK = tuple(HERE / f"reproduce_quick_seed{seed}.json" for seed in (0, 1))
SURPRISES = {
    "b-7-heads": (
        "The heads of a real encoder are slow in the mean of their outputs, and fast in the"
        " covariance, which the paper has slow too. What is slow in every head, and in the order of"
        " the coupling, is the attention map itself."
    ),
    "b-8-critical-path": (
        "The bound of the critical path is never broken, and tells nothing: it lies near 0 for"
        " every head, and the order it gives is not the order of the heads."
    ),
    "b-15-window-and-random": (
        "Random keys beside a window do not help: at as many keys the window alone errs no more."
    ),
    "b-16-downstream-horizon": (
        "Texts on which the horizon of the heads is larger do not agree less with the full model."
    ),
    "s-22-distance": (
        "The trained models do not come nearer and nearer: from 100 tokens to 1000 their weights"
        " part again. What comes nearer is what the weights do, their products"
        " ({doc}`../icl`)."
    ),
    "s-27-stability": (
        "Over all settings softmax attention is the more stable of the two, and in one of them the"
        " less stable."
    ),
    "o-32-sharp": (
        "The sharp exponents hold in the limit, and at the n of practice they are not there yet at"
        " middle horizons."
    ),
    "o-36-language-model": (
        "It was refuted at first, twice, and the measurement was at fault: exponents were fitted to"
        " more draws than a context has keys, where the error falls because the keys run out. Up to"
        " an eighth of the keys they are slow."
    ),
}
"""Of claims that came out otherwise than expected, or with more to it than the verdict."""


def write_page(folder: Path) -> None:
    """``what_holds.md`` with its pictures in a folder."""
    content, *others = (json.loads(path.read_text("utf-8")) for path in (SHOWN, *QUICK))
    folder.mkdir(parents=True, exist_ok=True)
    for claim in content["claims"]:
        if claim.get("picture"):
            save_picture(claim, folder / f"{claim['id']}.svg")
    (folder / "what_holds.md").write_text(page(content, others), "utf-8")


def page(content: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """``others``: runs of other seeds or sizes, of which the verdicts alone are shown."""
    claims = content["claims"]
    counts = ", ".join(
        f"{sum(claim['verdict'] == word for claim in claims)} {word}" for word in VERDICTS
    )
    seen = sum(bool(claim["seen"]) for claim in claims)
    again = [{claim["id"]: claim["verdict"] for claim in other["claims"]} for other in others]
    titles = [f"{other['scale']}, seed {other['seed']}" for other in others]
    lines = [
        "# What holds",
        "",
        (
            f"{len(claims)} claims, of the papers and of our own: {counts}. Each was decided by a"
            " rule that was"
        ),
        "tried on data where the claim is false ({doc}`../reproduce`).",
        (
            f"Of {seen} of the {len(claims)} measurements of their own had been seen when rule or"
            " settings were fixed, and of some"
        ),
        (
            "the rule was chosen after them; each says what (*Seen before*). What is shown was run"
            " after that, from a seed that"
        ),
        "had not been used before, but for claim 36, which was mended on the way; at the size of",
        f"`{command(content)}` ({content['written'][:10]}; its runs took",
        (
            f"{hours(content):.1f} hours, one process each). Laws are drawn anew by a seed; models"
            " and texts are the same ones."
        ),
        "Intervals are 99.9 % unless the rule says otherwise.",
        "",
        f"| claim | statement | verdict | effect | {' | '.join(titles)} |",
        f"|---|---|---|---|{'---|' * len(titles)}",
    ]
    for claim in claims:
        verdicts = [known.get(claim["id"], "not run") for known in again]
        told = [
            f"[{claim['id']}](#{claim['id']})",
            text(claim["statement"]),
            claim["verdict"],
            text(effect(claim)),
            *verdicts,
        ]
        lines.append(f"| {' | '.join(told)} |")
    runs = " and ".join(f"`{command(other)}` ({hours(other) * 60:.0f} minutes)" for other in others)
    lines += [
        "",
        f"The last columns are of {runs}.",
        changed(claims, again, titles),
        "",
        "## Surprises",
        "",
    ]
    reasons = {claim["id"]: (claim["verdict"], claim["reason"]) for claim in claims}
    for name, words in SURPRISES.items():
        verdict, reason = reasons[name]
        lines.append(
            f"- [{name}](#{name}) ({verdict}): {words} {text(reason[0].upper() + reason[1:])}."
        )
    for claim in claims:
        lines += section(claim)
    return "\n".join(lines) + "\n"


def command(content: Mapping[str, Any]) -> str:
    seed = f" --seed {content['seed']}" if content["seed"] else ""
    return f"esscher reproduce --all --{content['scale']}{seed}"


def hours(content: Mapping[str, Any]) -> float:
    """Of the runs, each counted once: claims share some."""
    seconds = {
        run["folder"]: run["seconds"]
        for claim in content["claims"]
        for run in claim["runs"].values()
    }
    return float(sum(seconds.values())) / 3600


def changed(
    claims: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, str]], titles: Sequence[str]
) -> str:
    """Which verdicts another run turned round, apart from undecided ones."""
    turned = [
        f"{claim['id']} ({title}: {known[claim['id']]})"
        for claim in claims
        for known, title in zip(again, titles, strict=True)
        if {claim["verdict"], known.get(claim["id"])} == {"supported", "refuted"}
    ]
    if turned:
        return f"They turn round: {', '.join(turned)}."
    return "No claim is supported in one of these runs and refuted in another."


def section(claim: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        f"({claim['id']})=",
        f"## {claim['id']}: {claim['verdict']}",
        "",
        text(claim["statement"]),
        "",
    ]
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
    low, high = claim["low"], claim["high"]
    ends = "" if low is None or high is None or low == high else f" [{low:.3g}, {high:.3g}]"
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
            axes.vlines(
                x,
                numbers(series["low"]),
                numbers(series["high"]),
                colors=points.get_color(),
                linewidth=1,
            )
    axes.set_xlabel(picture["x"])
    axes.set_ylabel(picture["y"])
    axes.set_xscale("log" if "x" in picture["log"] else "linear")
    axes.set_yscale("log" if "y" in picture["log"] else "linear")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(file)
    plt.close(figure)


def numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
