"""Where tokens come from: laws whose infinite-token limit is known."""

from esscher.measures.base import Measure
from esscher.measures.gaussian import Gaussian
from esscher.measures.mixture import Mixture
from esscher.measures.pool import Pool
from esscher.measures.product import Cube, Laplace, Rademacher
from esscher.measures.rotational import Ball, Sphere, Student

__all__ = [
    "Ball",
    "Cube",
    "Gaussian",
    "Laplace",
    "Measure",
    "Mixture",
    "Pool",
    "Rademacher",
    "Sphere",
    "Student",
]
