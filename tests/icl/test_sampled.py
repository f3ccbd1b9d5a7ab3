"""Drawn prompts: other losses and labels of several numbers [S, section 4]; the responses of both
models against autograd on the same tokens, and the law of long prompts against short ones.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esscher.icl import (
    OVKQ,
    UV,
    Block,
    LinearTask,
    Prompts,
    SingleIndexTask,
    VectorTask,
    default_weights,
    huber,
    predict,
    risk,
    sampled_risk,
)
from esscher.icl.layer import KINDS
from esscher.icl.sampled import Drawn, _draw, batches, respond
from esscher.icl.tasks import Task

TASK = LinearTask.kms(2, 0.5, noise=0.2)
BLOCK = Block([[0.5, 0.1], [0.0, 0.4]], 1.3)


def wide(k: int) -> UV:
    """The block form for k labels: every label has the value v, none scores."""
    U, V = (
        torch.zeros(2 + k, 2 + k, dtype=torch.float64),
        torch.zeros(2 + k, 2 + k, dtype=torch.float64),
    )
    U[:2, :2], V[2:, 2:] = BLOCK.U11, BLOCK.v * torch.eye(k, dtype=torch.float64)
    return UV(U, V)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_labels_of_one_task_each_have_risks_that_add(kind: str) -> None:
    """Three labels: three times the exact risk of one, within 4 standard errors (false alarms: 1 in
    8000 a kind).
    """
    drawn = sampled_risk(
        VectorTask(TASK, 3), wide(3), 12, kind, 20_000, torch.Generator().manual_seed(0)
    )
    assert abs(drawn.value - 3 * risk(TASK, BLOCK, 12, kind).value) < 4 * drawn.error


def test_one_label_in_a_vector_is_a_label() -> None:
    prompts = TASK.sample(5, 7, torch.Generator().manual_seed(1))
    vector = Prompts(prompts.x, prompts.y[..., None], prompts.query, prompts.target[..., None])
    for kind in ("softmax", "linear"):
        torch.testing.assert_close(
            predict(BLOCK, vector, kind)[:, 0], predict(BLOCK, prompts, kind)
        )
        torch.testing.assert_close(
            predict(BLOCK, vector, kind, True)[:, 0], predict(BLOCK, prompts, kind, True)
        )


def test_huber_is_smooth_and_meets_the_hypotheses() -> None:
    """grad_1 loss(0, 0) = 0; its slope is the distance up to 1 and 1 beyond."""
    predicted = torch.tensor([[0.0], [0.3], [1.0], [4.0]], dtype=torch.float64, requires_grad=True)
    loss = huber(predicted, torch.zeros(4, 1, dtype=torch.float64))
    torch.testing.assert_close(
        loss.detach(), torch.tensor([0.0, 0.045, 0.5, 3.5], dtype=torch.float64)
    )
    (slope,) = torch.autograd.grad(loss[1:].sum(), predicted)
    torch.testing.assert_close(slope[1:, 0], torch.tensor([0.3, 1.0, 1.0], dtype=torch.float64))


def test_huber_risk_of_no_weights_is_that_of_the_label() -> None:
    """Prediction 0, w = 0, y ~ N(0, 1): E huber = 1/2 erf(1/sqrt 2) + phi(1) - P(|y| > 1), within 4
    standard errors.
    """
    nothing = LinearTask([[1.0]], [[0.0]], 1.0)
    drawn = sampled_risk(
        nothing,
        Block([[0.0]], 0.0),
        3,
        "softmax",
        40_000,
        torch.Generator().manual_seed(2),
        loss=huber,
    )
    inside = math.erf(math.sqrt(0.5))
    density = math.exp(-0.5) / math.sqrt(2 * math.pi)
    exact = 0.5 * (inside - 2 * density) + 2 * density - 0.5 * (1 - inside)
    assert abs(drawn.value - exact) < 4 * drawn.error


TASKS: dict[str, Task] = {
    "isotropic": LinearTask.isotropic(5),
    "kms": LinearTask.kms(5, 0.5),
    "no noise, d = 2": LinearTask(torch.diag(torch.tensor([1.5, 0.4])), torch.eye(2), 0.0),
    "d = 1": LinearTask.isotropic(1, noise=0.3),
    "other queries": LinearTask.kms(3).with_queries(np.diag([2.0, 0.5, 1.0])),
    "not linear": SingleIndexTask(np.eye(3), "relu"),
}


def prompts_of(drawn: Drawn) -> Prompts:
    """Short prompts, token by token."""
    A = drawn.to_token
    z = drawn.white if A is None else drawn.white @ A.mT
    return Prompts(z[..., :-1], z[..., -1], drawn.query, drawn.label)


def heads_of(dim: int, count: int, seed: int = 3) -> list[OVKQ]:
    generator = torch.Generator().manual_seed(seed)
    return [default_weights(dim, generator) for _ in range(count)]


def responses(drawn: Drawn, heads: list[OVKQ]):
    """At the weights of each head, softmax attention's first."""
    uvs = [head.uv() for head in heads]
    theta = torch.stack([drawn.query @ uv.U[:, :-1].mT for uv in uvs], dim=1)
    return respond(drawn, theta, torch.stack([uv.V[-1] for uv in uvs]))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(("length", "heads"), [(1, 1), (10, 1), (7, 2)])
def test_outputs_and_derivatives_are_autograds_on_the_same_tokens(
    name: str, length: int, heads: int
) -> None:
    task, generator = TASKS[name], torch.Generator().manual_seed(1)
    own = heads_of(task.dim, 2 * heads)
    drawn = _draw(task, 4, length, generator, long=False)
    found, prompts = responses(drawn, own), prompts_of(drawn)
    for model, kind in enumerate(KINDS):
        outputs = torch.zeros(4, dtype=torch.float64)
        for place in range(model * heads, (model + 1) * heads):
            uv = own[place].uv()
            U, V = (part.clone().requires_grad_() for part in (uv.U, uv.V))
            output = predict(UV(U, V), prompts, kind)
            outputs += output.detach()
            for i in range(4):
                by_U, by_V = torch.autograd.grad(output[i], (U, V), retain_graph=True)
                theirs = torch.outer(found.by_theta[i, place], prompts.query[i])
                torch.testing.assert_close(by_U[:, :-1], theirs, atol=1e-12, rtol=1e-10)
                torch.testing.assert_close(
                    by_V[-1], found.by_value[i, place], atol=1e-12, rtol=1e-10
                )
        torch.testing.assert_close(found.output[:, model], outputs, atol=1e-12, rtol=1e-10)


CASES = [
    ("isotropic", 12, 1.0),
    ("kms", 100, 2.0),
    ("no noise, d = 2", 40, 1.0),
    ("d = 1", 50, 1.0),
    ("other queries", 30, 1.0),
    ("isotropic", 40, 0.0),  # equal weights: the weight vectors are collinear
]


@pytest.mark.parametrize(("name", "length", "scale"), CASES)
def test_long_prompts_have_the_joint_law_of_all_tokens(
    name: str, length: int, scale: float
) -> None:
    """Means and products of ten features: error and four projections of the derivatives of softmax
    attention and of linear attention with other weights, on the same prompts, 60,000 each. 65
    z-scores a case below 4.6: false alarms 3e-4 a case.
    """
    task, count = TASKS[name], 60_000
    soft, linear = heads_of(task.dim, 2, seed=length)
    soft = OVKQ(soft.O, soft.V, 3.0 * scale * soft.K, soft.Q)
    shape, generator = (2, 4, 2 * (task.dim + 1)), torch.Generator().manual_seed(5)
    directions = torch.randn(shape, dtype=torch.float64, generator=generator)
    features = []
    for long in (True, False):
        drawn = _draw(task, count, length, torch.Generator().manual_seed(length + long), long)
        found = responses(drawn, [soft, linear])
        slopes = torch.cat([found.by_value, found.by_theta], dim=-1)
        projected = torch.einsum("bmk,mjk->bmj", slopes, directions).flatten(1)
        each = torch.asinh(torch.cat([found.output - drawn.label[:, None], 5 * projected], dim=1))
        first, second = torch.triu_indices(10, 10)
        features.append(torch.cat([each, each[:, first] * each[:, second]], dim=1))
    ours, theirs = features
    spread = ((ours.var(dim=0) + theirs.var(dim=0)) / count).sqrt()
    z = (ours.mean(dim=0) - theirs.mean(dim=0)) / spread.clamp_min(1e-12)
    assert float(z.abs().max()) < 4.6, z


def test_batches_are_whole_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches drawn at once, or one in parts: as many prompts, and the length asked for."""
    for at_once in (10, 10_000):
        monkeypatch.setattr("esscher.icl.sampled.AT_ONCE", at_once)
        found = [
            [part.white.shape for part in batch]
            for batch in batches(TASK, 5, 7, 3, torch.Generator().manual_seed(0))
        ]
        assert [sum(shape[0] for shape in batch) for batch in found] == [7, 7, 7]
        assert {shape[1:] for batch in found for shape in batch} == {(5, 3)}
