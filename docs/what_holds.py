"""The page "What holds", made from reproduce.json when the documentation is built: a section and a
picture for each claim. Its table is in the repository as verdicts.csv: ``python
docs/what_holds.py`` writes it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esscher.papers.claim import VERDICTS

HERE = Path(__file__).parent
SHOWN = HERE / "reproduce.json"  # of the full run
QUICK = tuple(HERE / f"reproduce_quick_seed{seed}.json" for seed in (0, 1))
TABLE = HERE / "verdicts.csv"
SURPRISES = {
    "b-7-heads": (
        "In a real encoder the mean of the outputs converges slowly, as the paper says; the"
        " covariance converges fast, while the paper says slowly. The attention map itself is slow"
        " in every head, and slower at higher coupling."
    ),
    "b-8-critical-path": (
        "The bound always holds and says little: it is near 0 for every head, and it does not order"
        " the heads correctly."
    ),
    "b-15-window-and-random": (
        "Random keys beside a window do not help: with as many keys, the window alone is as good."
    ),
    "b-16-downstream-horizon": (
        "Texts on which the horizon of the heads is larger do not agree less with the full model."
    ),
    "s-22-distance": (
        "The distance between the weights of the trained models grows again from 100 tokens to"
        " 1000. The distance between the products of the weights, which determine the outputs,"
        " falls ({doc}`../icl`)."
    ),
    "s-27-stability": (
        "Over all settings softmax attention is more stable than linear attention; in one setting"
        " it is less stable."
    ),
    "o-32-sharp": (
        "At large horizons the slope is not yet the sharp exponent b at 10^15 tokens. It is above b"
        " by about 0.5/ln n, as if the error were n^-b/sqrt(ln n). An earlier rule allowed a"
        " difference of 0.05, which is as large as b itself at h = 3."
    ),
    "o-36-language-model": (
        "It was refuted twice at first, because of a mistake in the measurement: exponents were"
        " fitted at more draws than a context has keys, where the error falls because the keys run"
        " out. Up to an eighth of the keys they are slow."
    ),
    "b-37-equality": (
        "The exponent of the mean falls far more slowly with the coupling than 1/(2(1 + Psi)) does."
    ),
    "s-38-anisotropic": (
        "With the same trace, anisotropic covariates give a smaller error at every prompt length,"
        " also for softmax attention. As L grows the difference vanishes."
    ),
    "b-39-hardmax-beyond": (
        "The logarithmic rate holds in one dimension. In more dimensions, and in most heads, the"
        " mean output of hardmax falls faster."
    ),
    "o-40-critical-scale": (
        "Critical scale and coupling order the heads of MiniLM equally well; in SmolLM2 the"
        " critical scale does better."
    ),
}
"""Claims with an unexpected result, or one that needs more words than the verdict."""


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The full run, and others of which the verdicts alone are shown."""
    content, *others = (json.loads(path.read_text("utf-8")) for path in (SHOWN, *QUICK))
    return content, others


def write_page(folder: Path) -> None:
    """``what_holds.md`` with its pictures in a folder."""
    content, others = read()
    folder.mkdir(parents=True, exist_ok=True)
    for claim in content["claims"]:
        if claim.get("picture"):
            save_picture(claim, folder / f"{claim['id']}.svg")
    (folder / "what_holds.md").write_text(page(content, others), "utf-8")


def rows(content: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The table: a row for each claim."""
    again = {
        f"{other['scale']}, seed {other['seed']}": {
            one["id"]: one["verdict"] for one in other["claims"]
        }
        for other in others
    }
    return [
        {
            "claim": claim["id"],
            "statement": claim["statement"],
            "verdict": claim["verdict"],
            "effect": effect(claim),
            "run": run(claim),
            "blind": "no" if claim["seen"] else "yes",
            **{title: known.get(claim["id"], "not run") for title, known in again.items()},
        }
        for claim in content["claims"]
    ]


def table() -> str:
    """The content of verdicts.csv."""
    found, text = rows(*read()), io.StringIO()
    writer = csv.DictWriter(text, [*found[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def run(claim: Mapping[str, Any]) -> str:
    """Scale and seed of a claim's runs, by its command."""
    scale = "full" if "--full" in claim["command"] else "quick"
    found = re.search(r"--seed (\d+)", claim["command"])
    return f"{scale}, seed {found[1] if found else 0}"


def page(content: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    claims, shown = content["claims"], rows(content, others)
    counts = ", ".join(
        f"{sum(claim['verdict'] == word for claim in claims)} {word}" for word in VERDICTS
    )
    blind = ", ".join(str(claim["number"]) for claim in claims if not claim["seen"])
    lines = [
        "# What holds",
        "",
        f"{len(claims)} claims, from the papers and our own: {counts}. A rule decides each",
        "claim. Each rule was also tested on made-up data in which the claim is false",
        "({doc}`../reproduce`).",
        f"Claims {blind} are blind: rule and settings were fixed before any of their measurements",
        "were seen. Each of the others says what had been seen (*Seen before*). Every rule was",
        "fixed before the run that is shown, and the seed of that run was new. The exception is",
        "claim 36, which was corrected on the way. A new seed draws new tokens from laws; models",
        "and texts stay the same. The column *run* says whether a run is full or quick. All runs",
        f"together took {hours(content):.1f} hours, one process each.",
        "Intervals are 99.9 % unless the rule says otherwise; numbers without one are not sampled.",
        "",
        f"| {' | '.join(shown[0])} |",
        f"|{'---|' * len(shown[0])}",
    ]
    for row in shown:
        name, *told = row.values()
        lines.append(f"| [{name}](#{name}) | {' | '.join(map(text, told))} |")
    lines += [
        "",
        "The last columns are verdicts of `esscher reproduce --all --quick` at two other seeds.",
        changed(claims, others),
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


def hours(content: Mapping[str, Any]) -> float:
    """Of the runs, each counted once: claims share some."""
    seconds = {
        run["folder"]: run["seconds"]
        for claim in content["claims"]
        for run in claim["runs"].values()
    }
    return float(sum(seconds.values())) / 3600


def changed(claims: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """Which verdicts another run turned round, apart from undecided ones."""
    first = {claim["id"]: claim["verdict"] for claim in claims}
    turned = [
        f"{claim['id']} ({other['scale']}, seed {other['seed']}: {claim['verdict']})"
        for other in others
        for claim in other["claims"]
        if {claim["verdict"], first[claim["id"]]} == {"supported", "refuted"}
    ]
    if turned:
        return f"Verdicts that these runs reverse: {', '.join(turned)}."
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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


if __name__ == "__main__":
    TABLE.write_text(table(), "utf-8")
