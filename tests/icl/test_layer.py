"""The layer against plain loops and the package's own attention; parametrisations; PyTorch's
initialisation.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import esscher as es
from esscher.icl import (
    OVKQ,
    UV,
    Block,
    LinearTask,
    default_weights,
    predict,
    risk,
    risk_gradient,
)
from esscher.icl.layer import flatten, tensors, unflatten
from tests.attention.reference import attend_tokens


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_prediction_is_the_last_coordinate_of_attention(
    kind: str, generator: torch.Generator
) -> None:
    uv = UV(normal(generator, 4, 4), normal(generator, 4, 4))
    prompts = LinearTask.kms(3).sample(5, 7, generator)
    head = es.Head(A=uv.U, V=uv.V)
    rows = [
        attend_tokens(head, query[None], tokens, kernel=kind)[0, -1]
        for query, tokens in zip(prompts.query_token, prompts.tokens, strict=True)
    ]
    assert torch.allclose(predict(uv, prompts, kind), torch.stack(rows), rtol=1e-12)


def test_parametrisations_agree(generator: torch.Generator) -> None:
    O, V, K, Q = (
        normal(generator, 4, 2),
        normal(generator, 2, 4),
        normal(generator, 3, 4),
        normal(generator, 3, 4),
    )
    prompts = LinearTask.isotropic(3).sample(5, 7, generator)
    wanted = predict(UV(K.T @ Q, O @ V), prompts)
    assert torch.allclose(predict(OVKQ(O, V, K, Q), prompts), wanted)


def test_block_form(generator: torch.Generator) -> None:
    U11, prompts = normal(generator, 3, 3), LinearTask.isotropic(3).sample(5, 7, generator)
    uv = Block(U11.numpy(), 1.5).uv()
    assert torch.equal(uv.U[:3, :3], U11)
    assert float(uv.V[3, 3]) == 1.5
    assert float(uv.U.abs().sum()) == pytest.approx(float(U11.abs().sum()))
    scores = torch.einsum("bld,de,be->bl", prompts.tokens[..., :-1], U11, prompts.query)
    assert torch.allclose(
        predict(uv, prompts, "linear"), 1.5 * (scores * prompts.tokens[..., -1]).mean(dim=1)
    )


def test_gradients_reach_the_parameters(generator: torch.Generator) -> None:
    U11 = normal(generator, 3, 3).requires_grad_(True)
    v = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    predict(Block(U11, v), LinearTask.isotropic(3).sample(5, 7, generator)).sum().backward()
    assert U11.grad is not None
    assert float(U11.grad.abs().max()) > 0
    assert v.grad is not None


def test_gradients_are_pulled_back_as_autograd_does(generator: torch.Generator) -> None:
    by_U, by_V = normal(generator, 3, 3), normal(generator, 3, 3)
    shapes = ((3, 2), (2, 3), (4, 3), (4, 3))
    weights = [normal(generator, *shape).requires_grad_() for shape in shapes]
    block = normal(generator, 2, 2).requires_grad_(), normal(generator).requires_grad_()
    for params in (OVKQ(*weights), Block(*block), UV(by_V.clone().requires_grad_(), by_U)):
        uv = params.uv()
        leaves = [leaf for leaf in tensors(params) if leaf.requires_grad]
        slopes = torch.autograd.grad((uv.U * by_U).sum() + (uv.V * by_V).sum(), leaves)
        for ours, theirs in zip(tensors(params.pull(by_U, by_V)), slopes, strict=False):
            torch.testing.assert_close(ours.detach(), theirs)
        state = flatten(params)
        np.testing.assert_array_equal(flatten(unflatten(state, params)), state)


def test_default_weights_are_those_of_linear_layers() -> None:
    """Same bound as nn.Linear; Kolmogorov distance of 4 x 36 x 60 entries to its uniform law below
    the 1e-6 quantile.
    """
    torch.manual_seed(0)
    bound = 1 / math.sqrt(6)
    drawn = [default_weights(5, torch.Generator().manual_seed(seed)) for seed in range(60)]
    entries = (
        torch.cat([torch.cat([w.O.ravel(), w.V.ravel(), w.K.ravel(), w.Q.ravel()]) for w in drawn])
        .sort()
        .values
    )
    assert float(entries.abs().max()) <= bound
    assert float(torch.nn.Linear(6, 6, bias=False).weight.detach().abs().max()) <= bound
    grid = torch.arange(1, entries.numel() + 1, dtype=torch.float64) / entries.numel()
    assert float(((entries / bound + 1) / 2 - grid).abs().max()) < 2.7 / math.sqrt(entries.numel())
    assert torch.equal(drawn[3].K, default_weights(5, torch.Generator().manual_seed(3)).K)


def test_bad_input(generator: torch.Generator) -> None:
    prompts = LinearTask.isotropic(3).sample(2, 5, generator)
    with pytest.raises(ValueError, match="kind: expected one of softmax, linear"):
        predict(Block(np.eye(3), 1.0), prompts, "hardmax")
    with pytest.raises(ValueError, match="d = 2, the prompts have d = 3"):
        predict(Block(np.eye(2), 1.0), prompts)
    with pytest.raises(ValueError, match="finite"):
        Block([[float("inf")]], 1.0)


def test_a_block_takes_a_float32_matrix_beside_a_plain_number(generator: torch.Generator) -> None:
    """The number has the precision of the matrix, and risks are those of float64."""
    task, single, double = LinearTask.isotropic(2), Block(torch.eye(2), 1.0), Block(np.eye(2), 1.0)
    assert single.v.dtype == single.uv().U.dtype == single.uv().V.dtype == torch.float32
    for kind in ("softmax", "linear"):
        assert risk(task, single, 10, kind) == risk(task, double, 10, kind)
        assert risk_gradient(task, single, 10, kind)[0] == risk_gradient(task, double, 10, kind)[0]
    assert predict(single, task.sample(2, 5, generator)).dtype == torch.float64
