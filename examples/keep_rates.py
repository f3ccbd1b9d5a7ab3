"""How fast the error of kept keys falls: random, the largest scores, these with a reweighted rest,
Neyman; horizons 0.5 to 4.

``python examples/keep_rates.py [FILE]`` prints the rates and draws the figure of docs/keep.md.
Tokens and queries are Gaussian in one dimension. Random keys and Neyman's are n keys of an infinite
context. The largest scores are n of 16 n tokens; or n/2 keys are the largest and n/2 are drawn from
the rest and reweighted. Errors are against the limit of the law, so they contain the error of the
context itself: the dotted line is attention on all 16 n tokens. Nothing is sampled: means over
queries are integrals, for the rules with a context by a Gauss-Legendre rule.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

import esscher as es
from esscher.report.figures import PALETTE, STYLE, save_figure
from esscher.theory.sharp import l2_exponent_rms

HORIZONS = (0.5, 1.0, 2.0, 4.0)
N = 4 ** np.arange(2, 11)
SHOWN = [0, 3, 6, 8]  # of N, in the table
CONTEXT = 16  # tokens for each key kept
LAW = es.Gaussian([[1.0]])


def queries() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of |x|, x standard normal; the error is even in x, and of the largest
    scores not smooth at 0.
    """
    x, weights = [], []
    for low, high, count in ((0.0, 1.5, 8), (1.5, 3.5, 8), (3.5, 6.5, 6)):
        node, weight = np.polynomial.legendre.leggauss(count)
        x.append(0.5 * (low + high) + 0.5 * (high - low) * node)
        weights.append((high - low) * weight * np.exp(-(x[-1] ** 2) / 2) / np.sqrt(2 * np.pi))
    return np.concatenate(x), np.concatenate(weights)


def of_contexts(head: es.Head, rule: str) -> np.ndarray:
    """rms over Gaussian queries of a rule in which {half} stands for n/2, in contexts of 16 n
    tokens.
    """
    x, weights = queries()
    rows = torch.from_numpy(x)[:, None]
    mse = []
    for n in N.tolist():
        text, size = rule.format(half=n // 2), [n]
        mse.append(
            es.exact_curve(head, LAW, rows, size, keep=text, context=CONTEXT * n).queries.mse[:, 0]
        )
    return np.sqrt(weights @ np.stack(mse, axis=1))


def curves(horizon: float) -> dict[str, np.ndarray]:
    """Relative errors of each rule at every n."""
    head = es.Head([[horizon]], [[1.0]])
    found = {
        "random": es.exact_curve(head, LAW, LAW, N, keep="random").rms,
        "topk": of_contexts(head, "topk"),
        "topk + rest": of_contexts(head, "topk:{half}+random:reweight"),
        # the same at every query
        "neyman": es.exact_curve(head, LAW, [[1.0]], N, keep="neyman").rms,
        "all of 16 n": es.exact_curve(head, LAW, LAW, CONTEXT * N).rms,
    }
    # the limit's size is that of the horizon
    return {rule: rms / horizon for rule, rms in found.items()}


def exponent(rms: np.ndarray) -> float:
    """Over the last factor 16 of n."""
    return float(np.log(rms[-3] / rms[-1]) / np.log(N[-1] / N[-3]))


def show(found: dict[float, dict[str, np.ndarray]]) -> None:
    print(
        "horizon  rule         " + "".join(f"n = {N[i]:<10d}" for i in SHOWN) + "exponent  theory"
    )
    for horizon, rules in found.items():
        theory = {
            "random": l2_exponent_rms(horizon),
            "topk": 0.0,
            "neyman": 0.5,
            "all of 16 n": l2_exponent_rms(horizon),
        }
        for rule, rms in rules.items():
            said = f"{theory[rule]:.2f}" if rule in theory else ""
            errors = "".join(f"{rms[i]:<14.4g}" for i in SHOWN)
            print(
                f"{horizon:<8g} {rule:12s} {errors}{round(exponent(rms), 2) + 0.0:<10.2f}{said}".rstrip()  # noqa: E501
            )


def draw(found: dict[float, dict[str, np.ndarray]], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.0), layout="constrained")
        for ax, (horizon, rules) in zip(
            figure.subplots(2, 2, sharex=True, sharey=True).flat, found.items(), strict=True
        ):
            for (rule, rms), color in zip(rules.items(), PALETTE, strict=False):
                whole = rule.startswith("all")
                ax.plot(
                    N,
                    rms,
                    color="k" if whole else color,
                    lw=0.9 if whole else 1.8,
                    ls=":" if whole else "-",
                    label=rule,
                )
            ax.plot(
                N,
                rules["neyman"][-1] * np.sqrt(N[-1] / N),
                color="k",
                lw=0.8,
                ls="--",
                label=r"$n^{-1/2}$",
            )
            ax.set(xscale="log", yscale="log", title=f"horizon {horizon:g}")
        figure.supxlabel("keys kept n")
        figure.supylabel("relative rms error")
        figure.axes[0].legend(loc="lower left")
        save_figure(figure, path)
    print(f"figure: {path}")


if __name__ == "__main__":
    results = {horizon: curves(horizon) for horizon in HORIZONS}
    show(results)
    draw(results, Path(sys.argv[1] if len(sys.argv) > 1 else "keep_rates.svg"))
