"""Products and largest singular values of matrices that may be diagonal and may be large: what
predictions need of them.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float64
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

__all__ = ["is_diagonal", "largest_singular", "product", "spectral_norm"]

DENSE = 512  # up to this size all singular values are computed


def is_diagonal(matrix: Float64[Tensor, "r c"]) -> bool:
    """Whether a square matrix has no entry off its diagonal."""
    matrix = matrix.detach()
    if matrix.shape[0] != matrix.shape[1]:
        return False
    return int(torch.count_nonzero(matrix)) == int(torch.count_nonzero(matrix.diagonal()))


def product(left: Float64[Tensor, "r m"], right: Float64[Tensor, "m c"]) -> Float64[Tensor, "r c"]:
    """left @ right, in O(r c) where a factor is diagonal."""
    if is_diagonal(left):
        return left.diagonal()[:, None] * right
    if is_diagonal(right):
        return left * right.diagonal()
    return left @ right


def largest_singular(matrix: Float64[Tensor, "r c"]) -> tuple[float, Float64[Tensor, " c"]]:
    """The largest singular value and its right vector.

    Diagonal: read off. Above ``DENSE``: Lanczos iteration to rounding (ARPACK), since all singular
    values cost r c min(r, c).
    """
    matrix = matrix.detach()
    if is_diagonal(matrix):
        sizes = matrix.diagonal().abs()
        top = int(sizes.argmax())
        return float(sizes[top]), torch.eye(
            1, matrix.shape[1], dtype=matrix.dtype, device=matrix.device
        ).roll(top)[0]
    if min(matrix.shape) <= DENSE:
        _, values, rows = torch.linalg.svd(matrix, full_matrices=False)
        return float(values[0]), rows[0]
    array = matrix.cpu().numpy()
    operator = LinearOperator(
        array.shape, matvec=array.__matmul__, rmatvec=array.T.__matmul__, dtype=array.dtype
    )
    start = np.random.default_rng(0).standard_normal(min(array.shape))
    _, values, rows = svds(operator, k=1, v0=start, return_singular_vectors=True)
    return float(values[0]), torch.from_numpy(rows[0].copy()).to(matrix)


def spectral_norm(matrix: Float64[Tensor, "r c"]) -> float:
    """||matrix||_2."""
    return largest_singular(matrix)[0]
