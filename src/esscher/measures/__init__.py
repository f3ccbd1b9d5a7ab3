"""Where tokens come from: laws whose infinite-token limit is known."""

from esscher.measures.ball import Ball
from esscher.measures.base import Measure
from esscher.measures.cube import Cube
from esscher.measures.gaussian import Gaussian
from esscher.measures.laplace import Laplace
from esscher.measures.mixture import Mixture
from esscher.measures.pool import Pool
from esscher.measures.rademacher import Rademacher
from esscher.measures.sphere import Sphere
from esscher.measures.student import Student

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
