"""The compiled prompts: gradients against autograd on the same tokens, joint law against prompts
drawn token by token.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from esscher.icl import UV, LinearTask, Prompts, default_weights, predict
from esscher.icl.training.compiled_pair import CompiledPair
from esscher.icl.training.normals import fill_normals, seeded_lanes
from esscher.icl.training.pair import Step
from esscher.icl.training.prompts import add_prompts, new_totals, reflect, reflector
from esscher.icl.training.stream import chi_square, new_stream
from esscher.icl.training.tokens import SHORT
from esscher.icl.training.white import chain, weights_of, white_task, whiten

TASKS = {
    "isotropic": LinearTask.isotropic(5),
    "kms": LinearTask.kms(5, 0.5),
    "no noise, d = 2": LinearTask(torch.diag(torch.tensor([1.5, 0.4])), torch.eye(2), 0.0),
    "d = 1": LinearTask.isotropic(1, noise=0.3),
}


def settings(
    task: LinearTask, seed: int = 3, scale: float = 1.0
) -> tuple[np.ndarray, list[UV], np.ndarray]:
    """White parameters of two different models, the models, and the root of Sigma beside 1."""
    e = task.dim + 1
    random = np.random.default_rng(seed)
    root = np.eye(e)
    root[:-1, :-1] = task.root.numpy()
    white, models = np.zeros((2, e, e)), []
    for model in range(2):
        U, V = scale * 0.5 * random.normal(size=(e, e)), random.normal(size=(e, e))
        joined = np.column_stack([U[:, :-1], V[-1]])
        white[model] = root.T @ joined @ root
        models.append(UV(U, V))
    return white, models, root


def by_autograd(models: list[UV], prompts: Prompts) -> np.ndarray:
    """Per prompt: loss, then the gradient in [U without its last column, last row of V] flattened;
    (2, B, 1 + e e).
    """
    found = []
    for uv, kind in zip(models, ("softmax", "linear"), strict=True):
        U, V = uv.U.double(), uv.V.double()

        def loss(u: torch.Tensor, v: torch.Tensor, x, y, q, t, kind: str = kind) -> torch.Tensor:
            tokens = torch.cat([x, y[:, None]], dim=1)
            scores = tokens @ (u[:, :-1] @ q)
            weights = scores.softmax(0) if kind == "softmax" else scores / scores.numel()
            return ((weights @ (tokens @ v)) - t) ** 2

        gradient = torch.func.vmap(
            torch.func.grad_and_value(loss, (0, 1)), (None, None, 0, 0, 0, 0)
        )
        (by_u, by_v), value = gradient(
            U, V[-1], prompts.x, prompts.y, prompts.query, prompts.target
        )
        joined = torch.cat([by_u[:, :, :-1], by_v[:, :, None]], dim=2)
        found.append(torch.cat([value[:, None], joined.flatten(1)], dim=1).numpy())
    return np.stack(found)


def test_the_loss_used_here_is_that_of_predict():
    task = TASKS["kms"]
    _, models, _ = settings(task)
    prompts = task.sample(7, 11, torch.Generator().manual_seed(1))
    found = by_autograd(models, prompts)
    for model, kind in enumerate(("softmax", "linear")):
        squared = (predict(models[model], prompts, kind) - prompts.target) ** 2
        np.testing.assert_allclose(found[model, :, 0], squared.numpy(), rtol=1e-10)


def replayed(task: LinearTask, white: np.ndarray, length: int, seed: int) -> Prompts:
    """The tokens of the first (short) prompt of a stream, from the same normals in the same
    order.
    """
    d, e = task.dim, task.dim + 1
    lanes, buffer, _ = new_stream(seed, e)
    fill_normals(lanes, buffer)
    normals = iter(
        np.split(buffer.astype(np.float64), np.cumsum([2 * d + 1, 2 * length] + [e - 2] * length))
    )
    drawn, pair = next(normals), next(normals)
    query, w, eta = drawn[:d], task.task_root.numpy() @ drawn[d : 2 * d], drawn[-1]
    root, tau = task.root.numpy(), task.noise**0.5
    A = np.zeros((e, e))
    A[:d, :d], A[d, :d], A[d, d] = root, w @ root, tau
    joined = np.linalg.solve(
        np.block([[root.T, np.zeros((d, 1))], [np.zeros((1, d)), np.eye(1)]]), white[0]
    )
    theta, value = A.T @ joined[:, :d] @ query, A.T @ joined[:, d]
    h1, h2 = np.zeros(e), np.zeros(e)
    reflector(theta, 0, h1)
    reflect(h1, value)
    reflector(value, 1, h2)
    g = np.array([[pair[j], pair[length + j], *next(normals)] for j in range(length)])
    for row in g:
        reflect(h2, row)
        reflect(h1, row)
    z = torch.from_numpy(g @ A.T)[None]
    x_q = torch.from_numpy(root @ query)[None]
    return Prompts(z[..., :d], z[..., d], x_q, x_q @ torch.from_numpy(w) + tau * eta)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [1, 2, 10, SHORT - 1])
def test_gradient_equals_autograd_on_the_same_tokens(name: str, length: int):
    """Tolerance: float32 sums of up to 31 tokens."""
    task = TASKS[name]
    white, models, root = settings(task)
    prompts = replayed(task, white, length, seed=11)
    totals = new_totals(task.dim + 1)
    stream = new_stream(11, task.dim + 1)
    add_prompts(stream, 1, length, white, white_task(task), totals)
    expected = by_autograd(models, prompts)
    np.testing.assert_allclose(totals.loss, expected[:, 0, 0], rtol=3e-5, atol=1e-6)
    for model in range(2):
        ours = root @ totals.gradient[model] @ root.T
        theirs = expected[model, 0, 1:].reshape(ours.shape)
        np.testing.assert_allclose(ours, theirs, atol=3e-5 * np.abs(theirs).max())


def test_chain_rule_through_o_v_k_q():
    """Against autograd through a product loss that depends on U and c in a known linear way."""
    task = TASKS["kms"]
    weights = default_weights(5, torch.Generator().manual_seed(2), width=4)
    _, _, root = settings(task)
    parts = [weights.O[-1], weights.V, weights.K, weights.Q]
    o, V, K, Q = (part.clone().requires_grad_() for part in parts)
    slope = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    R = torch.from_numpy(root)
    joined = torch.cat([(K.T @ Q)[:, :-1], (V.T @ o)[:, None]], dim=1)
    ((R.T @ joined @ R) * slope).sum().backward()
    arrays = weights_of(weights)
    np.testing.assert_allclose(
        whiten(arrays, root), (R.T @ joined @ R).detach().numpy(), atol=1e-14
    )
    for ours, theirs in zip(chain(arrays, root, slope.numpy()), (o, V, K, Q), strict=True):
        np.testing.assert_allclose(ours, theirs.grad.numpy(), atol=1e-13)


@pytest.mark.parametrize("adam", [False, True])
def test_a_step_of_the_optimiser_is_torchs(adam: bool):
    """Three steps on prompts replayed from the stream are not needed: the gradient of a step
    follows from the weights it moved, so torch is given that gradient and must move alike.
    """
    task = TASKS["isotropic"]
    start = default_weights(5, torch.Generator().manual_seed(0))
    plain = CompiledPair(task, 8, start, Step(16, False, 1e6, 1))
    tested = CompiledPair(task, 8, start, Step(16, adam, 1e6, 1))
    plain.advance(np.array([1.0]))
    tested.advance(np.array([0.01]))
    for model in range(2):
        before = [start.O[-1], start.V, start.K, start.Q]
        tensors = [part.clone().requires_grad_() for part in before]
        for tensor, part, after in zip(tensors, before, plain.weights, strict=True):
            tensor.grad = part - torch.from_numpy(after[model])
        (torch.optim.Adam(tensors, 0.01) if adam else torch.optim.SGD(tensors, 0.01)).step()
        for tensor, after in zip(tensors, tested.weights, strict=True):
            np.testing.assert_allclose(after[model], tensor.detach().numpy(), atol=1e-9)


def features(losses: np.ndarray, gradients: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Loss and four projections of the gradient per model, compressed so that all moments exist;
    (B, 10).
    """
    projected = np.einsum("mbk,mjk->mbj", gradients, directions)
    return np.arcsinh(np.concatenate([losses.T, *projected], axis=1))


CASES = [
    ("isotropic", 10, 1.0),
    ("kms", SHORT, 1.0),
    ("kms", 100, 2.0),
    ("isotropic", 700, 1.0),  # two chunks
    ("no noise, d = 2", 40, 1.0),
    ("d = 1", 50, 1.0),
    ("isotropic", 40, 0.0),  # equal weights: the weight vectors are collinear
]


@pytest.mark.parametrize(("name", "length", "scale"), CASES)
def test_joint_law_of_both_models(name: str, length: int, scale: float):
    """Means and products of ten features (loss and gradient of softmax and of linear attention with
    other parameters on the same prompts) against prompts drawn token by token. 65 z-scores a case
    below 4.6: false alarms 3e-4 a case.
    """
    task = TASKS[name]
    white, models, root = settings(task, seed=length)
    if scale != 1.0:
        white[0, :, :-1] *= scale
        models[0] = UV(scale * models[0].U, models[0].V)
    count = 6000 if length > 500 else 16000
    e = task.dim + 1
    directions = np.random.default_rng(5).normal(size=(2, 4, e * e))
    stream = new_stream(7, e)
    losses, gradients = np.zeros((2, count)), np.zeros((2, count, e * e))
    for i in range(count):
        totals = new_totals(task.dim + 1)
        add_prompts(stream, 1, length, white, white_task(task), totals)
        losses[:, i] = totals.loss
        gradients[:, i] = (root @ totals.gradient @ root.T).reshape(2, -1)
    generator = torch.Generator().manual_seed(length)
    parts = [
        by_autograd(models, task.sample(1000, length, generator)) for _ in range(count // 1000)
    ]
    direct = np.concatenate(parts, axis=1)
    ours = features(losses, gradients, directions)
    theirs = features(direct[:, :, 0], direct[:, :, 1:], directions)
    pairs = np.triu_indices(ours.shape[1])
    ours, theirs = (
        np.concatenate([f, f[:, pairs[0]] * f[:, pairs[1]]], axis=1) for f in (ours, theirs)
    )
    spread = np.sqrt(ours.var(axis=0) / count + theirs.var(axis=0) / count)
    z = (ours.mean(axis=0) - theirs.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    assert np.abs(z).max() < 4.6, z


def test_normals_are_normal():
    """Kolmogorov-Smirnov at 1e-4 on 2^18 numbers, neighbouring lanes and their squares uncorrelated
    within 4.5 sigma.
    """
    out = np.empty(1 << 18, np.float32)
    fill_normals(seeded_lanes(1), out)
    x = out.astype(np.float64)
    assert scipy.stats.kstest(x, "norm").pvalue > 1e-4
    for lag in (1, 255, 256, 512):
        for f in (lambda v: v, lambda v: (v * v - 1) / 2**0.5):
            assert abs((f(x[lag:]) * f(x[:-lag])).mean()) < 4.5 / x.size**0.5


@pytest.mark.parametrize("freedom", [1, 8, 9, 60])
def test_chi_square(freedom: int):
    """Kolmogorov-Smirnov at 1e-4."""
    stream = new_stream(freedom, 6)
    drawn = np.array([chi_square(stream, freedom) for _ in range(20000)])
    assert scipy.stats.kstest(drawn, scipy.stats.chi2(freedom).cdf).pvalue > 1e-4
