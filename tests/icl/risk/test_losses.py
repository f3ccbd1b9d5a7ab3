"""Other losses and labels of several numbers [S, section 4]: against the exact risk of one label,
and closed forms.
"""

from __future__ import annotations

import math

import pytest
import torch

from esscher.icl import (
    UV,
    Block,
    LinearTask,
    Prompts,
    VectorTask,
    huber,
    predict,
    risk,
    sampled_risk,
)

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
