from .base import Measure as Measure
from .gaussian import Gaussian as Gaussian
from .mixture import Mixture as Mixture
from .pool import Pool as Pool
from .product import Cube as Cube, Laplace as Laplace, Rademacher as Rademacher
from .rotational import Ball as Ball, Sphere as Sphere, Student as Student
