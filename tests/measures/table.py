"""One row per law: a new measure is tested by adding a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import esscher as es
from tests.measures.triangular import Triangular


def _tokens(rows: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(
        rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def _singular() -> torch.Tensor:
    factor = _tokens(5, 2, 1)
    return factor @ factor.T


@dataclass(frozen=True)
class Law:
    name: str
    make: Callable[[], es.Measure]
    tilt: float = 1.0  # largest |theta_i| the tests use; a law with a strip stays inside it


LAWS = [
    Law(
        "gaussian", lambda: es.Gaussian(_tokens(3, 3, 0).T @ _tokens(3, 3, 0), _tokens(1, 3, 2)[0])
    ),
    Law("gaussian-singular", lambda: es.Gaussian(_singular(), 0.5 * _tokens(1, 5, 3)[0])),
    Law("sphere", lambda: es.Sphere(7, 1.7)),
    Law("sphere-circle", lambda: es.Sphere(2, 0.6)),
    Law("sphere-line", lambda: es.Sphere(1, 1.3)),
    Law("ball", lambda: es.Ball(5, 2.3)),
    Law("ball-line", lambda: es.Ball(1, 1.1)),
    Law("cube", lambda: es.Cube(3, 1.9)),
    Law("rademacher", lambda: es.Rademacher(3, 0.8)),
    Law("laplace", lambda: es.Laplace(3, 0.5), tilt=0.5),
    Law("triangular-outside", lambda: Triangular(2, 1.7)),
    Law("pool", lambda: es.Pool(_tokens(41, 3, 4))),
    Law(
        "mixture",
        lambda: es.Mixture(
            [0.3, 0.7], [es.Gaussian(torch.eye(2).double(), [2.0, -1.0]), es.Sphere(2)]
        ),
    ),
    Law(
        "mixture-nested",
        lambda: es.Mixture(
            [1, 3], [es.Mixture([0.5, 0.5], [es.Cube(3), es.Ball(3, 2.0)]), es.Laplace(3, 0.4)]
        ),
        tilt=0.6,
    ),
]
