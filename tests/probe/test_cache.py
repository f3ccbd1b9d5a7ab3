"""Budgets from curves that are known in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from esscher.probe.budget import budget_of, budget_table
from esscher.probe.curves import stored_curves
from esscher.runs import Run

KEYS = 1024
COUNTS = np.array([16, 32, 64, 128, 256, 512, 768, 922, 1024])
# constants of rms = c sqrt(1/n - 1/N) in units of the limit, by (layer, head); two heads share each
# key-value head
CONSTANTS = {
    (0, 0): 1.0,
    (0, 1): 2.0,
    (0, 2): 4.0,
    (0, 3): 0.3,
    (1, 0): 1.0,
    (1, 1): 1.0,
    (1, 2): 8.0,
    (1, 3): 0.5,
}
LIMIT = 3.0


def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    heads = pd.DataFrame(
        [
            {"layer": layer, "head": head, "kv_head": head // 2, "status": "ok"}
            for layer, head in CONSTANTS
        ]
    )
    rows = []
    for (layer, head), constant in CONSTANTS.items():
        relative = constant * np.sqrt(1 / COUNTS - 1 / KEYS)
        rows.append(
            pd.DataFrame(
                {
                    **{
                        "layer": layer,
                        "head": head,
                        "metric": "l2_kept",
                        "kind": "exact",
                        "n": COUNTS,
                    },
                    **{
                        "rms": LIMIT * relative,
                        "relative": relative,
                        "stderr": 0.0,
                        "q95": LIMIT * relative,
                    },
                    "local_slope": np.nan,
                }
            )
        )
        rows.append(rows[-1].assign(metric="l2", rms=99.0))
    return heads, pd.concat(rows, ignore_index=True)


def needed(constant: float, epsilon: float) -> int:
    """c^2 (1/n - 1/N) <= eps^2."""
    return max(math.ceil(1 / ((epsilon / constant) ** 2 + 1 / KEYS) - 1e-9), int(COUNTS[0]))


@pytest.mark.parametrize("epsilon", [0.05, 0.1, 0.3])
def test_tokens_of_heads_and_caches(epsilon: float) -> None:
    found = budget_of(*tables(), epsilon)
    assert [(row.layer, row.head) for row in found.heads.itertuples()] == list(CONSTANTS)
    for row in found.heads.itertuples():
        assert row.tokens == pytest.approx(needed(CONSTANTS[row.layer, row.head], epsilon), abs=1)
        assert row.kv_head == row.head // 2
        assert row.ratio == row.tokens / KEYS
    assert [(row.layer, row.kv_head) for row in found.caches.itertuples()] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    for cache in found.caches.itertuples():
        own = found.heads[
            (found.heads["layer"] == cache.layer) & (found.heads["kv_head"] == cache.kv_head)
        ]
        assert cache.tokens == own["tokens"].max()
        assert cache.heads == 2
        assert cache.n_keys == KEYS


def test_the_worst_head_and_layer_of_every_split() -> None:
    """c sqrt(1/n - 1/N) of a head with the n keys of its cache; of a layer the mean over its heads,
    whose limits are alike.
    """
    found = budget_of(*tables(), total=800)
    kept = {"uniform": [200] * 4, "best split": found.caches["best_split"].tolist()}
    for row in found.totals.itertuples():
        errors = {
            (layer, head): constant**2 * (1 / kept[row.rule][2 * layer + head // 2] - 1 / KEYS)
            for (layer, head), constant in CONSTANTS.items()
        }
        worst = max(errors, key=errors.__getitem__)
        layers = [math.sqrt(sum(errors[layer, head] for head in range(4)) / 4) for layer in (0, 1)]
        assert row.worst_head == f"{worst[0]}.{worst[1]}"
        assert row.worst == pytest.approx(math.sqrt(errors[worst]), rel=1e-3)
        assert row.worst_layer == str(int(layers[1] > layers[0]))
        assert row.worst_layer_error == pytest.approx(max(layers), rel=1e-3)
    totals = found.totals.set_index("rule")
    assert totals["worst"]["best split"] > math.sqrt(totals["squared_error"]["best split"])


def squared(tokens: Any) -> float:
    """Squared relative error of the four caches, mean over their eight heads, in closed form."""
    caches = [(0, 0), (0, 1), (1, 0), (1, 1)]
    size = [sum(CONSTANTS[layer, 2 * kv + i] ** 2 for i in (0, 1)) for layer, kv in caches]
    return sum(c2 * (1 / n - 1 / KEYS) for c2, n in zip(size, tokens, strict=True)) / len(CONSTANTS)


@pytest.mark.parametrize("epsilon", [0.05, 0.1, 0.3])
def test_totals_meet_the_error_with_the_fewest_tokens(epsilon: float) -> None:
    found = budget_of(*tables(), epsilon)
    totals = found.totals.set_index("rule")
    assert list(totals.index) == ["each head its own", "uniform", "best split"]
    for row in totals.itertuples():
        assert row.ratio == pytest.approx(row.tokens / (4 * KEYS))
        assert row.saved == pytest.approx(1 - row.ratio)
        assert row.epsilon == epsilon
        assert row.squared_error <= epsilon**2 * (1 + 1e-9)
    assert totals["tokens"]["each head its own"] == found.caches["tokens"].sum()
    assert totals["tokens"]["best split"] == found.caches["best_split"].sum()
    assert totals["tokens"]["best split"] <= totals["tokens"]["uniform"]
    # the closed form: n_i proportional to the root of the summed squared constants, while no cache
    # is full or at its least
    assert totals["squared_error"]["best split"] == pytest.approx(
        squared(found.caches["best_split"]), rel=1e-6
    )
    even, total = totals["tokens"]["uniform"] // 4, totals["tokens"]["uniform"]
    assert squared([even + 1] * 4) <= epsilon**2
    assert squared([even - 1] * 4) >= epsilon**2 * (1 - 1e-6) or total == 4 * COUNTS[0]


def test_the_best_split_follows_the_square_root_rule() -> None:
    """min sum C_i / n_i with sum n_i = T: n_i proportional to sqrt(C_i)."""
    total = 1200
    found = budget_of(*tables(), total=total)
    roots = np.sqrt([1 + 4, 16 + 0.09, 2, 64.25])
    np.testing.assert_allclose(found.caches["best_split"], total * roots / roots.sum(), rtol=0.02)
    totals = found.totals.set_index("rule")
    assert (
        found.caches["best_split"].sum()
        == totals["tokens"]["best split"]
        == totals["tokens"]["uniform"]
        == total
    )
    assert totals["squared_error"]["uniform"] == pytest.approx(squared([300] * 4), rel=1e-6)
    best = roots.sum() ** 2 / total / 8 - sum(roots**2) / KEYS / 8
    assert totals["squared_error"]["best split"] == pytest.approx(best, rel=1e-3)
    assert totals["squared_error"]["best split"] < totals["squared_error"]["uniform"]


def test_a_head_counts_by_its_relative_error() -> None:
    """A layer whose outputs are a hundred times as large, errors with them, needs what it needed
    before.
    """
    heads, curves = tables()
    curves.loc[curves["layer"] == 1, "rms"] *= 100
    for asked in ({"epsilon": 0.1}, {"total": 1200}):
        large, same = budget_of(heads, curves, **asked), budget_of(*tables(), **asked)
        pd.testing.assert_frame_equal(large.caches, same.caches)
        pd.testing.assert_frame_equal(large.totals, same.totals)


def test_table_of_several_errors() -> None:
    heads, curves = tables()
    table = budget_table(heads, curves, [0.1, 0.2])
    assert list(table["epsilon"]) == [0.1] * 3 + [0.2] * 3
    pd.testing.assert_frame_equal(
        table[table["epsilon"] == 0.1], budget_of(heads, curves, 0.1).totals
    )


def test_heads_that_failed_are_left_out() -> None:
    heads, curves = tables()
    curves = curves[(curves["layer"] != 0) | (curves["head"] != 2)]
    found = budget_of(heads, curves, 0.1)
    assert (0, 2) not in set(zip(found.heads["layer"], found.heads["head"], strict=True))
    assert list(found.caches["heads"]) == [2, 1, 2, 2]


def test_a_head_that_gives_nothing_needs_nothing() -> None:
    """Values of 0 (a pruned head): no error and no limit to compare with."""
    heads, curves = tables()
    silent = (curves["layer"] == 1) & (curves["head"] == 2)
    curves.loc[silent, "rms"] = 0.0
    curves.loc[silent, "relative"] = np.nan
    found = budget_of(heads, curves, 0.1)
    assert (1, 2) not in set(zip(found.heads["layer"], found.heads["head"], strict=True))
    assert list(found.caches["heads"]) == [2, 2, 2, 1]
    assert np.isfinite(found.totals["squared_error"]).all()


@pytest.mark.parametrize("epsilon", [0, -0.1, 1, 1.5, math.nan, "much"])
def test_errors_outside_0_and_1_are_refused(epsilon: Any) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        budget_of(*tables(), epsilon)


def test_totals_out_of_reach_are_refused() -> None:
    for total in (63, 4 * KEYS + 1):
        with pytest.raises(ValueError, match=r"total: expected between 64 .* and 4096"):
            budget_of(*tables(), total=total)


def test_curves_without_kept_keys_are_refused() -> None:
    heads, curves = tables()
    with pytest.raises(ValueError, match="no errors of kept keys"):
        budget_of(heads, curves[curves["metric"] == "l2"], 0.1)


def test_budget_of_real_heads_meets_its_error(real_run: Run) -> None:
    heads, curves = real_run.table("heads"), real_run.table("curves")
    known = stored_curves(curves, "l2_kept")
    for place, curve in known.items():
        rows = curves[
            (curves["layer"] == place[0])
            & (curves["head"] == place[1])
            & (curves["metric"] == "l2_kept")
        ]
        np.testing.assert_allclose(curve.relative, rows["relative"], rtol=1e-9)
    found = budget_of(heads, curves, 0.1)
    totals = found.totals.set_index("rule")["squared_error"]
    assert (totals <= 0.01 * (1 + 1e-6)).all()
    split = budget_of(heads, curves, total=int(0.3 * 6 * 2048)).totals.set_index("rule")[
        "squared_error"
    ]
    assert split["best split"] <= split["uniform"]
