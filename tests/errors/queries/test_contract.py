"""Every integral over a law of queries against queries drawn from that law.

Random covariances, means and biases under fixed seeds. A mean over drawn queries is compared within
5.5 of its standard errors (4e-8 for one normal number, two-sided); at some 400 comparisons a right
library fails with a chance of about 2e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import esscher as es
from esscher.icl.quadrature import score_law

ERRORS = 5.5
DRAWS = 3000
N = [1, 7, 60]


def numbers(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)


def covariance(seed: int, dim: int, decades: float) -> Tensor:
    """Eigenvalues up to so many powers of ten apart, in a random basis."""
    turn = torch.linalg.qr(numbers(seed)(dim, dim)).Q
    spread = torch.rand(dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return 0.3 * turn * 10 ** (-decades * spread) @ turn.T


def compare(
    head: es.Head, law: es.Measure, queries: es.Measure, seed: int, draws: int = DRAWS
) -> None:
    """The integrated curve, and that it is one: nothing was drawn."""
    found = es.exact_curve(head, law, queries, N)
    assert (found.query_stderr == 0).all()
    assert "integrated" in found.origin
    x = queries.sample(draws, torch.Generator().manual_seed(1000 + seed))
    drawn = es.exact_curve(head, law, x, N)
    assert drawn.queries is not None
    for got, each in (
        (found.rms**2, drawn.queries.mse),
        (1 / np.asarray(found.effective_tokens), drawn.queries.sum_p2),
    ):
        error = each.std(axis=0, ddof=1) / math.sqrt(draws) + 1e-9 * got
        assert (np.abs(got - each.mean(axis=0)) < ERRORS * error).all()


@pytest.mark.parametrize("seed", range(24))
def test_gaussian_queries(seed: int) -> None:
    """Of every dimension and rank, centred or not, with tilt biases or none."""
    noise = numbers(seed)
    width, dim = 1 + seed % 5, 1 + (seed // 2) % 4
    mean = None if seed % 6 == 0 else noise(width)
    bias = 0.5 * noise(dim) if seed % 2 else None
    head = es.Head(0.6 * noise(dim, width), noise(2, dim), bias, noise(2))
    law = es.Gaussian(covariance(seed, dim, 2.0), noise(dim))
    compare(head, law, es.Gaussian(covariance(seed + 50, width, seed % 9), mean), seed)


@pytest.mark.parametrize("seed", range(6))
def test_pools_and_rademacher_queries(seed: int) -> None:
    noise = numbers(seed)
    head = es.Head(noise(3, 3), noise(2, 3), noise(3), noise(2))
    law = es.Gaussian(covariance(seed, 3, 2.0), noise(3)) if seed % 2 else es.Sphere(3)
    head = head if seed % 2 else es.Head(head.A, head.V)
    queries = es.Pool(noise(20, 3)) if seed < 3 else es.Rademacher(3, 0.8)
    compare(head, law, queries, seed)


@pytest.mark.parametrize("seed", range(10))
def test_pushforwards(seed: int) -> None:
    """Mean and covariance of the limit, entry by entry; what the result says of its own error is
    allowed beside.
    """
    noise, dim = numbers(seed), 2 + seed % 3
    law: es.Measure = [
        es.Gaussian(covariance(seed, dim, 4.0), noise(dim)),
        es.Sphere(dim, 1.5),
        es.Ball(dim, 1.5),
        es.Pool(noise(30, dim)),
        es.Mixture([0.4, 0.6], [es.Gaussian(covariance(seed, dim, 1.0), noise(dim)), es.Ball(dim)]),
    ][seed % 5]
    stretch = torch.diag(10 ** (-0.5 * torch.arange(dim, dtype=torch.float64)))
    bias = 0.5 * noise(dim) if seed >= 5 else None
    head = es.Head(2.0 * noise(dim, dim) @ stretch, noise(2, dim), bias, noise(2))
    limit = es.limit(head, law)
    found = limit.pushforward()
    out = limit(law.sample(20_000, torch.Generator().manual_seed(1000 + seed)))
    apart = out - found.mean
    error = apart.std(0) / math.sqrt(len(out))
    assert bool((apart.mean(0).abs() <= ERRORS * (error + found.mean_error) + 1e-12).all())
    products = apart[:, :, None] * apart[:, None, :]
    error = products.std(0) / math.sqrt(len(out))
    allowed = ERRORS * (error + found.cov_error) + 1e-12
    assert bool(((products.mean(0) - found.cov).abs() <= allowed).all())


@pytest.mark.parametrize("seed", range(10))
def test_the_score_law_of_icl_risks(seed: int) -> None:
    """E phi(s), E phi(s) g_i^2 and E phi(s) g_i^2 g_j^2, phi = s^2 / (1 + s^2)."""
    dim = 1 + seed % 5
    C = covariance(seed, dim, seed).numpy()
    law = score_law(C)
    g = np.random.default_rng(seed).standard_normal((200_000, dim))
    s2 = np.einsum("mi,ij,mj->m", g, C, g)
    g2 = (g @ law.basis) ** 2
    phi, nodes = s2 / (1 + s2), law.s**2 / (1 + law.s**2)
    third = np.where(np.eye(dim) == 1, 1 / 3, 1.0)
    for got, each in (
        (nodes @ law.one, phi),
        (nodes @ law.square, phi[:, None] * g2),
        (
            np.einsum("t,tij->ij", nodes, law.pair),
            phi[:, None, None] * g2[:, :, None] * g2[:, None, :] * third,
        ),
    ):
        error = each.std(axis=0) / math.sqrt(len(g))
        assert (np.abs(got - each.mean(axis=0)) < ERRORS * error).all()
