"""Paired SGD: the two paths agree in law, schedules, records, divergence, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esscher.icl import LinearTask, SingleIndexTask, default_weights
from esscher.icl.risk.exact import risk
from esscher.icl.training.autograd_pair import AutogradPair
from esscher.icl.training.compiled_pair import CompiledPair
from esscher.icl.training.pair import ALIVE, Pair, Step
from esscher.icl.training.schedule import learning_rates, record_steps
from esscher.icl.training.train import TrainingDiverged, train

TASK = LinearTask.kms(3, 0.5)
FEW = {"records": 4, "evaluation": 64, "final_evaluation": 256}


def pairs(
    seed: int, adam: bool = False, batch: int = 32, length: int = 12
) -> tuple[CompiledPair, AutogradPair]:
    start = default_weights(3, torch.Generator().manual_seed(5))
    step = Step(batch, adam, 1e4, seed)
    return CompiledPair(TASK, length, start, step), AutogradPair(TASK, length, [start], step)


@pytest.mark.parametrize("adam", [False, True])
def test_both_paths_train_alike(adam: bool):
    """Parameters after 20 steps, mean over 20 seeds, differ by less than 5 standard errors in each
    of six projections; false alarms 3e-4 (Student).
    """
    rates = np.full(20, 5e-3 if adam else 0.08)
    ends: list[list[np.ndarray]] = [[], []]
    for seed in range(20):
        for found, pair in zip(ends, pairs(seed, adam), strict=True):
            pair.advance(rates)
            found.append(np.stack([_joined(pair, model) for model in range(2)]))
    directions = np.random.default_rng(0).normal(size=(3, 16))
    ours, theirs = (
        np.einsum("smk,jk->smj", np.array(found).reshape(20, 2, -1), directions) for found in ends
    )
    spread = np.sqrt((ours.var(axis=0, ddof=1) + theirs.var(axis=0, ddof=1)) / 20)
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 5 * spread).all()


def _joined(pair: Pair, model: int) -> np.ndarray:
    uv = pair.uv(model)[0]
    return torch.cat([uv.U[:, :-1], uv.V[-1][:, None]], dim=1).numpy()


def test_evaluation_is_the_exact_risk():
    """Within 4 standard errors of twice the exact risk, both paths, both models; false alarms
    3e-4.
    """
    for pair in pairs(0):
        pair.advance(np.full(100, 0.05))
        mse, stderr = pair.evaluate(20_000)
        for model, kind in enumerate(("softmax", "linear")):
            exact = 2 * float(risk(TASK, pair.uv(model)[0], 12, kind))
            assert abs(mse[model] - exact) < 4 * stderr[model]


def test_steps_do_not_depend_on_how_they_are_grouped():
    one, _ = pairs(3)
    other, _ = pairs(3)
    one.advance(np.full(20, 0.02))
    for size in (1, 7, 12):
        other.advance(np.full(size, 0.02))
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_training_reaches_the_least_risk_of_linear_attention():
    """d = 2, L = 20: the least mean squared error of linear attention, by Sigma_L, is reached
    within one per cent.
    """
    task = LinearTask.isotropic(2)
    found = train(task, 20, steps=6000, rate=0.02, seed=1, **FEW)
    length, budget = 20, 1.0 + 0.1
    best = 1.1 - 2 / 2 / (1 + 1 / length + 2 * budget / length)
    uv = found.parameters["linear"][0].uv()
    assert 2 * float(risk(task, uv, length, "linear")) == pytest.approx(best, rel=0.01)
    assert set(found.final["status"]) == {"ok"}
    assert list(found.curve["step"].unique()) == list(found.distance["step"])
    assert found.distance["distance2"].iloc[0] == 0


def test_many_heads_and_other_tasks_train():
    """More heads than one, and a nonlinear task, go through autograd and lower the loss."""
    found = train(TASK, 8, steps=150, rate=0.1, heads=2, batch=64, **FEW)
    assert len(found.parameters["softmax"]) == 2
    assert found.path["values"].map(len).eq(2 * 16).all()
    losses = found.curve[found.curve["model"] == "linear"].set_index("step")["loss"].dropna()
    assert losses.iloc[-1] < losses.iloc[0]
    nonlinear = train(SingleIndexTask(torch.eye(2), "relu"), 8, steps=5, **FEW)
    assert set(nonlinear.final["status"]) == {"ok"}


@pytest.mark.parametrize("heads", [1, 2])
def test_divergence_stops_with_step_loss_and_advice_and_the_other_goes_on(heads: int):
    with pytest.raises(
        TrainingDiverged,
        match=r"diverged: loss .* at step \d+, above the bound 50; try a rate below 0.3",
    ) as caught:
        train(TASK, 4, steps=400, rate=0.3, batch=16, bound=50.0, heads=heads, **FEW)
    training = caught.value.training
    lost = training.diverged
    assert len(lost) >= 1
    assert (lost["loss"] > 50).all()
    assert (lost["step"] <= 400).all()
    assert training.curve["mse"].isna().any()


def test_one_model_may_diverge_alone():
    """The bound is set between the two models' losses by hand: linear stops at once, softmax trains
    on.
    """
    pair, _ = pairs(0, length=2, batch=256)
    for part in pair.weights:
        part[1] *= 30.0
    losses = pair.advance(np.full(10, 1e-3))
    assert pair.diverged.tolist() == [ALIVE, 1]
    assert np.isfinite(losses[0]).all()
    assert np.isnan(losses[1, 1:]).all()


def test_schedules_and_records():
    np.testing.assert_allclose(learning_rates(2.0, 4), 2.0)
    np.testing.assert_allclose(learning_rates(1.0, 4, "linear"), [1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(learning_rates(1.0, 4, "cosine")[2], 0.5)
    np.testing.assert_allclose(learning_rates(1.0, 5, "constant", 3), [0.25, 0.5, 0.75, 1, 1])
    steps = record_steps(1000, 20)
    assert steps[0] == 0
    assert steps[-1] == 1000
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "length"),
        ({"steps": 0}, "steps"),
        ({"batch": -1}, "batch"),
        ({"batch": 1.5}, "batch"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"optimizer": "newton"}, "optimizer: expected one of sgd, adam, got 'newton'"),
        ({"schedule": "step"}, "schedule: expected one of constant, linear, cosine"),
        ({"warmup": 9}, "warmup"),
        ({"heads": 0}, "heads"),
        ({"bound": 0}, "bound"),
    ],
)
def test_bad_input(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        train(TASK, change.pop("length", 4), **({"steps": 5} | FEW | change))


@pytest.mark.parametrize("heads", [1, 2])
def test_half_of_the_square_is_half_the_rate(heads: int) -> None:
    """SGD on half the square at twice the rate makes the same steps; its losses are half as large.
    One head: compiled.
    """
    asked = {
        "steps": 20,
        "batch": 8,
        "records": 4,
        "evaluation": 10,
        "final_evaluation": 10,
        "heads": heads,
    }
    task = LinearTask.isotropic(2)
    square, half = (
        train(task, 5, rate=0.01, **asked),
        train(task, 5, rate=0.02, loss="half", **asked),
    )
    np.testing.assert_allclose(np.stack(half.final["K"]), np.stack(square.final["K"]), rtol=1e-9)
    later = square.curve["step"] > 0
    np.testing.assert_allclose(
        half.curve["loss"][later], 0.5 * square.curve["loss"][later], rtol=1e-9
    )
    np.testing.assert_allclose(half.curve["mse"], square.curve["mse"], rtol=1e-9)
    with pytest.raises(ValueError, match="loss: expected one of square, half"):
        train(task, 5, loss="third", **asked)
