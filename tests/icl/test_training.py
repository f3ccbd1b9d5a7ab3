"""Drawn prompts: responses against autograd. Paired training: against torch's own autograd and
optimiser on the same prompts; the exact risk, records, divergence, bad input, and the run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import esscher as es
from esscher.icl import (
    OVKQ,
    UV,
    LinearTask,
    default_weights,
    predict,
    risk,
)
from esscher.icl.layer import KINDS
from esscher.icl.specs import FlowSpec, TrainSpec
from esscher.icl.training import (
    Pair,
    batches,
    record_steps,
    respond,
    train,
)
from esscher.runs import execute, find_job, resume
from tests.icl.other_task import OtherTask

LABELLED = LinearTask.kms(2, 0.5, noise=0.2)


TASKS: dict[str, LinearTask | OtherTask] = {
    "kms": LinearTask.kms(5, 0.5),
    "no noise, d = 2": LinearTask(torch.diag(torch.tensor([1.5, 0.4])), torch.eye(2), 0.0),
    "other queries": LinearTask.kms(3).with_queries(np.diag([2.0, 0.5, 1.0])),
    "not linear": OtherTask(es.Gaussian(np.eye(3)), torch.relu),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [1, 10])
def test_outputs_and_derivatives_are_autograds_on_the_same_tokens(name: str, length: int) -> None:
    task, generator = TASKS[name], torch.Generator().manual_seed(1)
    own = [default_weights(task.dim, generator).uv() for _ in range(2)]
    prompts = task.sample(4, length, generator)
    theta = torch.stack([prompts.query @ uv.U[:, :-1].mT for uv in own], dim=1)
    outputs, by_value, by_theta = respond(prompts, theta, torch.stack([uv.V[-1] for uv in own]))
    for model, kind in enumerate(KINDS):
        U, V = (part.clone().requires_grad_() for part in (own[model].U, own[model].V))
        output = predict(UV(U, V), prompts, kind)
        for i in range(4):
            by_U, by_V = torch.autograd.grad(output[i], (U, V), retain_graph=True)
            theirs = torch.outer(by_theta[i, model], prompts.query[i])
            torch.testing.assert_close(by_U[:, :-1], theirs, atol=1e-12, rtol=1e-10)
            torch.testing.assert_close(by_V[-1], by_value[i, model], atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(outputs[:, model], output.detach(), atol=1e-12, rtol=1e-10)


def test_batches_are_whole_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches drawn at once, or one in parts: as many prompts, and the length asked for."""
    for at_once in (10, 10_000):
        monkeypatch.setattr("esscher.icl.training.AT_ONCE", at_once)
        found = [
            [part.tokens.shape for part in batch]
            for batch in batches(LABELLED, 5, 7, 3, torch.Generator().manual_seed(0))
        ]
        assert [sum(shape[0] for shape in batch) for batch in found] == [7, 7, 7]
        assert {shape[1:] for batch in found for shape in batch} == {(5, 3)}


TASK = LinearTask.kms(3, 0.5)
FEW = {"records": 4, "evaluation": 64, "final_evaluation": 256}


def pair(length: int = 12, **changes: object) -> Pair:
    return Pair(TASK, length, TrainSpec(**{"steps": 100, "batch": 32, "seed": 5} | changes))


def test_training_is_torchs_on_the_same_prompts() -> None:
    """Five steps with autograd through ``predict`` and torch's optimiser."""
    rate = 0.01
    ours = pair(rate=rate, steps=5, batch=8)
    ours.advance(5)
    for model, kind in enumerate(KINDS):
        start = default_weights(3, torch.Generator().manual_seed(5))
        parts = [part.requires_grad_() for part in (start.O, start.V, start.K, start.Q)]
        step = torch.optim.SGD(parts, rate)
        for (prompts,) in batches(TASK, 12, 8, 5, torch.Generator().manual_seed(5)):
            output = predict(OVKQ(*parts), prompts, kind)
            step.zero_grad()
            ((output - prompts.target) ** 2).mean().backward()
            step.step()
        own = ours.parameters(model)
        for a, b in zip((own.O, own.V, own.K, own.Q), parts, strict=True):
            torch.testing.assert_close(a, b.detach(), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("length", [12, 150])
def test_evaluation_is_the_exact_risk(length: int) -> None:
    """Within 4 standard errors of twice the exact risk, both models; false alarms 1.3e-4."""
    trained = pair(length, rate=0.05)
    trained.advance(50)
    mse, stderr = trained.evaluate(20_000)
    for model, kind in enumerate(KINDS):
        exact = 2 * float(risk(TASK, trained.parameters(model), length, kind))
        assert abs(mse[model] - exact) < 4 * stderr[model]


def test_steps_do_not_depend_on_how_they_are_grouped() -> None:
    one, other = pair(rate=0.02), pair(rate=0.02)
    one.advance(20)
    for size in (1, 7, 12):
        other.advance(size)
    for a, b in zip(one.weights, other.weights, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_training_reaches_the_least_risk_of_linear_attention():
    """d = 2, L = 20: the least mean squared error of linear attention, by Sigma_L, is reached
    within one per cent.
    """
    task = LinearTask.isotropic(2)
    found = train(task, 20, steps=2000, rate=0.06, batch=512, seed=1, **FEW)
    length, budget = 20, 1.0 + 0.1
    best = 1.1 - 2 / 2 / (1 + 1 / length + 2 * budget / length)
    (row,) = found["final"].query("model == 'linear'").to_dict("records")
    weights = OVKQ(*(np.reshape(row[name], (3, 3)) for name in "OVKQ"))
    assert 2 * float(risk(task, weights, length, "linear")) == pytest.approx(best, rel=0.01)
    assert set(found["final"]["status"]) == {"ok"}
    assert list(found["curve"]["step"].unique()) == list(found["distance"]["step"])
    assert found["distance"]["distance2"].iloc[0] == 0


def test_other_tasks_train():
    """Training lowers the loss, and a nonlinear task trains."""
    found = train(TASK, 8, steps=150, rate=0.1, batch=64, **FEW)
    assert found["final"]["Q"].map(len).eq(16).all()
    losses = found["curve"][found["curve"]["model"] == "linear"].set_index("step")["loss"].dropna()
    assert losses.iloc[-1] < losses.iloc[0]
    nonlinear = train(OtherTask(es.Cube(2), torch.relu), 8, steps=5, **FEW)
    assert set(nonlinear["final"]["status"]) == {"ok"}


def test_divergence_stops_with_step_loss_and_advice_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("esscher.icl.training.BOUND", 50.0)
    found = train(TASK, 4, steps=400, rate=0.3, batch=16, **FEW)
    lost = found["final"][found["final"]["status"] == "diverged"]
    assert len(lost) >= 1
    assert (lost["loss"] > 50).all()
    assert (lost["step"] <= 400).all()
    said = r"diverged: loss .* at step \d+, above the bound 50; try a rate below 0.3"
    assert lost["advice"].str.contains(said).all()
    assert found["curve"]["mse"].isna().any()


def test_one_model_may_diverge_alone():
    """Linear attention begins with weights 30 times as large: it stops at once and is kept as it
    was, softmax attention trains on.
    """
    trained = pair(2, batch=256, steps=10, rate=1e-3)
    for part in trained.weights:
        part[1] *= 30.0
    before = [part[1].clone() for part in trained.weights]
    losses = trained.advance(10)
    assert trained.diverged == [None, 1]
    assert np.isfinite(losses[:, 0]).all()
    assert np.isnan(losses[1:, 1]).all()
    for kept, part in zip(trained.weights, before, strict=True):
        assert torch.equal(kept[1], part)
    assert np.isnan(trained.evaluate(10)[0]).tolist() == [False, True]


def test_records():
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
        ({"bound": 0}, "bound"),
    ],
)
def test_bad_input(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        train(TASK, change.pop("length", 4), **({"steps": 5} | FEW | change))


SMALL = {
    "dim": 2,
    "covariances": ("kms:0.3",),
    "lengths": (4, 8),
    "seeds": 2,
    "steps": 60,
    "rate": 0.02,
}
SPEC = TrainSpec(**SMALL, records=4, evaluation=64, final_evaluation=20_000)


def test_paper_settings_are_the_defaults():
    spec = TrainSpec()
    assert (spec.dim, spec.noise, spec.steps, spec.batch, spec.rate) == (5, 0.1, 500_000, 128, 1e-3)
    assert [unit["length"] for unit in find_job("icl-train").units(spec)] == sorted(
        unit["length"] for unit in find_job("icl-train").units(spec)
    )
    assert len(find_job("icl-train").units(spec)) == 18


def test_flows_are_of_the_cpu_and_say_so(tmp_path: Path):
    with pytest.raises(ValueError, match="icl-flow is computed on the CPU, got 'cuda'"):
        execute(FlowSpec(lengths=(10,), device="cuda"), tmp_path / "run")


def test_a_training_run_is_resumed_to_the_same_tables(tmp_path: Path):
    run = execute(SPEC, tmp_path / "run")
    assert set(run.tables) == {"curve", "distance", "final"}
    final = run.table("final")
    assert len(final) == 8
    before = {name: (tmp_path / "run" / f"{name}.parquet").read_bytes() for name in run.tables}
    (tmp_path / "run" / "shards" / "000002.parquet").unlink()
    resume(tmp_path / "run")
    for name, content in before.items():
        assert (tmp_path / "run" / f"{name}.parquet").read_bytes() == content
    assert (run.table("distance").query("step == 0")["distance2"] == 0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": (0,)},
        {"lengths": ()},
        {"steps": 0},
        {"batch": 0},
        {"rate": -1.0},
        {"seeds": 0},
    ],
)
def test_bad_specs(change: dict[str, object]):
    with pytest.raises(ValidationError, match=next(iter(change))):
        TrainSpec(**change)
