"""Tasks draw what they say: moments, shapes, other laws, and what they refuse. Sizes are distinct
primes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import esscher as es
from esscher.icl import LinearTask, Prompts
from esscher.icl.tasks import as_task
from tests.icl.other_task import OtherTask

TASKS: list[LinearTask | OtherTask] = [
    LinearTask.isotropic(3),
    LinearTask.kms(3, 0.5),
    LinearTask([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0]], noise=0),
    OtherTask(es.Cube(3, 1.7), torch.tanh),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_shapes(task: LinearTask | OtherTask, generator: torch.Generator) -> None:
    prompts = task.sample(7, 5, generator)
    assert isinstance(prompts, Prompts)
    assert prompts.tokens.shape == (7, 5, 4)
    assert torch.equal(
        prompts.query_token, torch.cat([prompts.query, torch.zeros(7, 1, dtype=torch.float64)], 1)
    )


def test_moments_of_a_linear_task(generator: torch.Generator) -> None:
    """Covariance of (x, y) over tasks within 5 standard errors, entry by entry: false alarm below
    1e-5.
    """
    W = torch.tensor([[0.5, 0.2], [0.2, 1.0]], dtype=torch.float64)
    task = LinearTask.kms(2, 0.5, task_cov=W, noise=0.3)
    prompts = task.sample(200_000, 1, generator)
    z = prompts.tokens[:, 0]
    products = z[:, :, None] * z[:, None, :]
    wanted = torch.zeros(3, 3, dtype=torch.float64)
    wanted[:2, :2] = task.sigma
    wanted[2, 2] = torch.sum(task.sigma * W) + 0.3
    error = products.std(dim=0) / 200_000**0.5
    assert bool(((products.mean(dim=0) - wanted).abs() < 5 * error).all())
    # E[y y_q | x, x_q], since both labels have one w
    own = (prompts.tokens[..., :-1][:, 0] @ W * prompts.query).sum(-1)
    left = prompts.tokens[..., -1][:, 0] * prompts.target - own
    assert abs(float((left * own).mean())) < 5 * float((left * own).std() / 200_000**0.5)
    assert float(own.std()) > 0.5


def test_one_task_a_prompt(generator: torch.Generator) -> None:
    """Without noise the d labelled tokens of a prompt fix w, and w gives the label of the query."""
    prompts = LinearTask.isotropic(3, noise=0).sample(11, 3, generator)
    w = torch.linalg.solve(prompts.tokens[..., :-1], prompts.tokens[..., -1][..., None])[..., 0]
    assert torch.allclose((w * prompts.query).sum(-1), prompts.target, atol=1e-9)


def test_a_singular_sigma_stays_in_its_range(generator: torch.Generator) -> None:
    x = TASKS[2].sample(5, 7, generator).tokens
    assert torch.allclose(x[..., 0], x[..., 1])


def test_constructors() -> None:
    assert torch.equal(LinearTask.isotropic(2).sigma, torch.eye(2, dtype=torch.float64))
    assert torch.allclose(
        LinearTask.kms(3, 0.5).sigma[0], torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    )
    assert torch.allclose(LinearTask.isotropic(5).task_cov, torch.eye(5, dtype=torch.float64) / 5)
    assert LinearTask.isotropic(5).noise == 0.1


def test_the_same_generator_gives_the_same_prompts() -> None:
    one, two = (
        LinearTask.isotropic(3).sample(2, 5, torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.target, two.target)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: LinearTask([[1.0, 2.0], [2.0, 1.0]]),
            (
                "sigma: expected a positive semi-definite matrix, got an eigenvalue -0.333 times"
                " the largest"
            ),
        ),
        (lambda: LinearTask([[1.0, 2.0], [0.0, 1.0]]), "symmetric"),
        (lambda: LinearTask([[1.0, float("nan")], [0.0, 1.0]]), "finite"),
        (lambda: LinearTask.isotropic(2, task_cov=np.eye(3)), "task_cov: expected a 2 x 2"),
        (lambda: LinearTask.isotropic(2, noise=-1), "noise: expected the variance"),
        (lambda: LinearTask.kms(2, 1.5), "rho: expected a correlation"),
        (lambda: LinearTask.isotropic(2).sample(0, 3), "batch: expected whole numbers from 1"),
        (lambda: LinearTask.isotropic(2).sample(3, 0), "length: expected whole numbers from 1"),
    ],
)
def test_bad_input(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("name", ["round", "kms:x", "kms:1,2", "diag:1", "isotropic:3", "kms:2"])
def test_unknown_covariances(name: str):
    with pytest.raises(ValueError, match=r"covariance|rho"):
        as_task(name, 3)
