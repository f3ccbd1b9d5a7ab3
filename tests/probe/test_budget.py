"""Budgets of keep rules from a frontier that is known in closed form, and the files that others
read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from esscher.intervals import mean_interval
from esscher.probe.budget import (
    budget_table,
    find_rule,
    nats_table,
    per_query,
    rule_budget,
)
from tests.models.frontiers import CONSTANTS, KEYS, SHARES, frontier, frontier_run, one_head_a_layer

PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]
# by cache and head
SQUARES = np.array([[CONSTANTS[layer, 2 * kv + i] ** 2 for i in (0, 1)] for layer, kv in PLACES])


def needed(square: float, epsilon: float) -> float:
    """c^2 (1/n - 1/N) = eps^2, from the first size on."""
    return max(1 / (epsilon**2 / square + 1 / KEYS), SHARES[0] * KEYS)


@pytest.mark.parametrize("epsilon", [0.05, 0.1, 0.3])
def test_keys_of_caches(epsilon: float) -> None:
    found = rule_budget(frontier(), "heavy", epsilon)
    assert [(row.layer, row.kv_head) for row in found.caches.itertuples()] == PLACES
    for row, squares in zip(found.caches.itertuples(), 0.25 * SQUARES, strict=True):
        assert row.keys == pytest.approx(needed(squares.mean(), epsilon), abs=2e-3)
        assert row.ratio == pytest.approx(row.keys / KEYS)
        assert row.error == pytest.approx(
            math.sqrt(squares.mean() * (1 / row.keys - 1 / KEYS)), rel=1e-6
        )


def test_layers_that_hold_different_numbers_of_keys() -> None:
    """Windows of 200, 200 and 600 keys, one key-value head for four heads. 400 of the 1000 keys are
    80, 80 and 240 in the uniform split.
    """
    held = {0: 200.0, 1: 200.0, 2: 600.0}
    table = one_head_a_layer(held, heads=4)
    found = rule_budget(table, "keynorm", total=400)
    assert [(row.layer, row.kv_head, row.heads) for row in found.caches.itertuples()] == [
        (layer, 0, 4) for layer in held
    ]
    assert found.caches["n_keys"].tolist() == list(held.values())
    uniform = found.totals.set_index("split").loc["uniform"]
    assert uniform["ratio"] == pytest.approx(0.4)
    squares = [(1 + layer) ** 2 * (1 / (0.4 * n) - 1 / n) for layer, n in held.items()]
    assert uniform["error"] == pytest.approx(math.sqrt(sum(squares) / 3), rel=1e-6)
    for epsilon in (0.1, 0.3):
        totals = rule_budget(table, "keynorm", epsilon).totals
        assert totals["ratio"].to_numpy() == pytest.approx(totals["keys"].to_numpy() / 1000)


def test_totals_at_an_error() -> None:
    found = rule_budget(frontier(), "heavy", 0.1)
    totals = found.totals.set_index("split")
    assert list(totals.index) == ["every head at the error", "uniform", "best split"]
    assert totals["keys"]["every head at the error"] == pytest.approx(found.caches["keys"].sum())
    uniform = 4 * needed(0.25 * SQUARES.mean(), 0.1)
    assert totals["keys"]["uniform"] == pytest.approx(uniform, rel=1e-3)
    assert totals["keys"]["best split"] == pytest.approx(found.caches["best_split"].sum())
    assert totals["keys"]["best split"] < totals["keys"]["uniform"]
    for row in totals.itertuples():
        assert row.error <= 0.1 * (1 + 1e-6)
        assert row.ratio == pytest.approx(row.keys / (4 * KEYS))
        assert row.saved == pytest.approx(1 - row.ratio)
        assert (row.rule, row.where) == ("heavy", "any cache")
    worst = 0.5 * 6 * math.sqrt(4 / totals["keys"]["uniform"] - 1 / KEYS)
    assert totals["worst_head"]["uniform"] == "1.2"
    assert totals["worst"]["uniform"] == pytest.approx(worst, rel=1e-3)


def test_the_best_split_of_a_total_follows_the_square_root_rule() -> None:
    """min sum C_i / n_i with sum n_i = T: n_i proportional to sqrt(C_i)."""
    found = rule_budget(frontier(), "heavy", total=300)
    roots = np.sqrt(SQUARES.sum(1))
    np.testing.assert_allclose(found.caches["keys"], 300 * roots / roots.sum(), rtol=0.03)
    assert found.caches["keys"].sum() == pytest.approx(300)
    totals = found.totals.set_index("split")
    assert list(totals.index) == ["uniform", "best split"]
    assert totals["epsilon"].isna().all()
    np.testing.assert_allclose(totals["keys"], 300)
    assert totals["error"]["uniform"] == pytest.approx(
        math.sqrt(0.25 * SQUARES.mean() * (1 / 75 - 1 / KEYS)), rel=1e-4
    )
    best = 0.25 * (roots.sum() ** 2 / 300 - SQUARES.sum() / KEYS) / SQUARES.size
    assert totals["error"]["best split"] == pytest.approx(math.sqrt(best), rel=1e-3)


def test_every_rule_in_one_table() -> None:
    table = budget_table(frontier(), [(0.1, None), (0.2, None)])
    assert len(table) == 5 * 2 * 3
    own = table[(table["epsilon"] == 0.1) & (table["split"] == "uniform")].set_index("rule")[
        "ratio"
    ]
    assert list(own.index) == ["random", "sinks:4+recent", "heavy", "topk", "neyman"]
    assert (np.diff(own[["random", "sinks:4+recent", "heavy", "topk"]]) < 0).all()
    where = table.drop_duplicates("rule").set_index("rule")["where"]
    assert dict(where) == {
        **dict.fromkeys(("random", "sinks:4+recent", "heavy"), "any cache"),
        **dict.fromkeys(("topk", "neyman"), "needs all keys"),
    }
    pd.testing.assert_frame_equal(
        table[(table["rule"] == "heavy") & (table["epsilon"] == 0.1)].reset_index(drop=True),
        rule_budget(frontier(), "heavy", 0.1).totals,
    )


def test_an_error_that_rises_with_more_keys_is_not_a_saving() -> None:
    """No kept key counts as no error, so that few random keys may seem to be enough: what counts is
    where it stays below.
    """
    table = frontier()
    few = (table["rule"] == "heavy") & (table["share"] <= 0.01)
    table.loc[few, ["rms", "relative", "q95"]] = 0.0
    found, whole = rule_budget(table, "heavy", 0.05), rule_budget(frontier(), "heavy", 0.05)
    big = whole.caches["keys"] > 0.02 * KEYS
    np.testing.assert_allclose(found.caches["keys"][big], whole.caches["keys"][big], rtol=0.02)


def test_a_cache_without_sizes_of_a_rule_needs_all_of_its_keys() -> None:
    table = frontier()
    table = table[(table["rule"] != "heavy") | (table["layer"] != 1) | (table["kv_head"] != 0)]
    found = rule_budget(table, "heavy", 0.1).caches.set_index(["layer", "kv_head"])
    assert found["ratio"][1, 0] == 1
    assert found["error"][1, 0] == 0
    assert (found["ratio"].drop((1, 0)) < 1).all()


def test_heads_without_a_relative_error_are_left_out() -> None:
    table = frontier()
    table.loc[(table["layer"] == 1) & (table["head"] == 2), "relative"] = np.inf
    found = rule_budget(table, "heavy", 0.1)
    assert list(found.caches["heads"]) == [2, 2, 2, 1]
    numbers = found.totals.drop(columns="kl").select_dtypes("number")
    assert np.isfinite(numbers).all(axis=None)


def test_rules_are_found_however_they_are_written() -> None:
    table = frontier({"sinks:4+recent": 1.0, "heavy:last=32": 1.0})
    assert find_rule(table, " sinks:4 + recent") == "sinks:4+recent"
    assert find_rule(table, "heavy:last=32") == "heavy:last=32"
    with pytest.raises(
        ValueError, match=r"no errors of heavy; it has those of sinks:4\+recent, heavy:last=32"
    ):
        find_rule(table, "heavy")
    with pytest.raises(ValueError, match="no rule 'best'; esscher rules lists all rules"):
        find_rule(table, "best")
    assert per_query("topk:8+random:reweight")
    assert not per_query("neyman:shared")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"epsilon": 0.1, "total": 300},
        {"epsilon": 1},
        {"epsilon": 0},
        {"total": 7},
        {"total": 1601},
    ],
)
def test_bad_questions_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        rule_budget(frontier(), "heavy", **asked)


# ---- losses in nats: a (1/n - 1/N) of each cache, a the sum of FELT c^2 / 4 over its heads


LOSSES = (SQUARES * np.array([[4.0], [4.0], [0.25], [0.25]])).sum(1) / 4  # of heavy


def test_a_total_goes_where_the_predicted_loss_is_least() -> None:
    """sum a / n over caches is least where n goes with the root of a."""
    table = frontier(nats=True)
    found = rule_budget(table, "heavy", total=300)
    roots = np.sqrt(LOSSES)
    assert np.allclose(found.caches["keys"], 300 * roots / roots.sum(), rtol=0.02)
    losses = LOSSES * (1 / found.caches["keys"] - 1 / KEYS)
    assert np.allclose(found.caches["nats"], losses, rtol=1e-3)
    assert found.totals.set_index("split")["nats"]["best split"] == pytest.approx(
        losses.sum(), rel=1e-3
    )


@pytest.mark.parametrize("kl", [0.02, 0.1, 0.3])
def test_the_fewest_keys_for_a_loss(kl: float) -> None:
    found = rule_budget(frontier(nats=True), "heavy", kl=kl)
    totals = found.totals.set_index("split")
    assert list(totals.index) == ["uniform", "one cut", "best split"]
    assert np.allclose(totals["nats"], kl, rtol=5e-3)
    assert (totals["nats"] <= kl * (1 + 1e-3)).all()
    uniform = 4 / (kl / LOSSES.sum() + 1 / KEYS)
    assert totals["keys"]["uniform"] == pytest.approx(uniform, rel=1e-3)
    best = np.sqrt(LOSSES).sum() ** 2 / (kl + LOSSES.sum() / KEYS)
    assert totals["keys"]["best split"] == pytest.approx(best, rel=0.01)
    # one cut: caches of layer 0 keep ten times as many as those of layer 1
    first, second = LOSSES[:2].sum(), LOSSES[2:].sum()
    cut = 22 / 10 * (first + 10 * second) / (kl + LOSSES.sum() / KEYS)
    if cut / 22 >= 2 and 10 * cut / 22 <= 0.6 * KEYS:  # within what was measured
        assert totals["keys"]["one cut"] == pytest.approx(cut, rel=0.02)
    assert totals["keys"]["best split"] <= totals["keys"].min() * (1 + 1e-3)
    assert found.caches["nats"].sum() == pytest.approx(totals["nats"]["best split"])
    assert (totals["beyond"] == (kl > 0.2)).all()


def test_the_interval_of_a_loss_is_over_windows() -> None:
    totals = rule_budget(frontier(nats=True), "heavy", kl=0.1).totals
    for row in totals.itertuples():
        wanted = mean_interval(row.nats * np.array([0.5, 0.75, 1.75]), least=0.0)
        assert (row.nats, row.nats_low, row.nats_high) == pytest.approx(wanted, rel=1e-9)


def test_the_losses_of_a_model_at_every_share() -> None:
    table = nats_table(frontier(nats=True))
    rows = table[(table["rule"] == "heavy") & (table["split"] == "uniform")].set_index("share")
    for share in (0.01, 0.1, 0.6):
        loss = LOSSES.sum() * (1 / (share * KEYS) - 1 / KEYS)
        assert rows["nats"][share] == pytest.approx(loss, rel=1e-3)
        assert rows["ratio"][share] == pytest.approx(share, rel=1e-3)
        assert rows["beyond"][share] == (loss > 0.2)
    wide = table[table["rule"] == "heavy"].pivot(index="share", columns="split", values="nats")
    assert (wide["best split"] <= wide["uniform"] * (1 + 1e-9)).all()
    assert (wide["best split"] <= wide["one cut"] * (1 + 1e-3)).all()
    assert set(table[table["rule"] == "random"]["split"]) == {"uniform", "best split"}
    assert not len(nats_table(frontier()))


def test_a_run_has_a_budget_for_a_loss(tmp_path: Path) -> None:
    """Without a rule: the one whose cache is smallest, chosen once."""
    run = frontier_run(tmp_path / "run", frontier(nats=True))
    found = run.budget(kl=0.05)
    assert found.rule == "heavy"
    wanted = rule_budget(frontier(nats=True), "heavy", kl=0.05)
    pd.testing.assert_frame_equal(found.caches, wanted.caches)
    with pytest.raises(ValueError, match="kl: expected a finite number above 0"):
        run.budget(kl=0)
    with pytest.raises(ValueError, match="the model has no language head"):
        frontier_run(tmp_path / "old").budget(kl=0.05)
    encoder = frontier_run(tmp_path / "encoder", frontier().assign(nats=float("nan")))
    with pytest.raises(ValueError, match="the model has no language head"):
        encoder.budget(kl=0.05)
