"""Do measured exponents follow the horizon and the coupling? Rank correlations over the heads of a
stored probe.

``python examples/probe_rates.py RUN``. Spearman's rank correlation of each measured exponent with
the two-sided horizon and with the coupling Psi, and its 95 % interval (percentile bootstrap over
heads); then the exponents of the heads with the lowest and highest coupling. ``beta_fit`` is the
exponent of the exact root mean square error over queries. ``beta_mean`` and ``beta_cov``, the
exponents of the outputs' moments, exist if the run was made with ``--moments``.
"""

from __future__ import annotations

import sys

import esscher as es
from esscher.intervals import rank_correlation

NAMES = {
    "beta_fit": "exact error",
    "beta_mean": "mean of outputs",
    "beta_cov": "covariance of outputs",
}


def main(path: str) -> None:
    run = es.load_run(path)
    heads = run.table("heads")
    heads = heads[heads["status"] == "ok"]
    known = [name for name in NAMES if name in heads]
    print(f"{'exponent of the':<24}{'with':<12}{'rank correlation':>17}   95 % interval")
    for name in known:
        for other in ("horizon2", "coupling"):
            value, low, high = rank_correlation(heads[name], heads[other])
            print(f"{NAMES[name]:<24}{other:<12}{value:>17.2f}   [{low:.2f}, {high:.2f}]")
    print()
    print(
        f"{'head':<6}{'coupling':>9}{'horizon2':>9}  "
        + "".join(f"{NAMES[name]:>30}" for name in known)
    )
    ordered = heads.sort_values("coupling")
    for row in [*ordered.head(6).to_dict("records"), *ordered.tail(12).to_dict("records")]:
        cells = []
        for name in known:
            low, high = (
                (row["beta_low"], row["beta_high"])
                if name == "beta_fit"
                else (row[f"{name}_low"], row[f"{name}_high"])
            )
            cells.append(f"{row[name]:.3f} [{low:.3f}, {high:.3f}]")
        place = f"{row['layer']}.{row['head']}"
        print(
            f"{place:<6}{row['coupling']:>9.2f}{row['horizon2']:>9.2f}  "
            + "".join(f"{cell:>30}" for cell in cells)
        )
    for name in known:
        if name == "beta_fit":
            continue
        below = heads[heads[f"{name}_high"] < 0.5]
        print(
            f"\n{NAMES[name]}: {len(below)} of {len(heads)} intervals lie below 1/2 altogether",
            end="",
        )
    print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/probe_rates.py RUN")
    main(sys.argv[1])
