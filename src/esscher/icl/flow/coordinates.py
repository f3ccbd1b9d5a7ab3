"""Parameters as the vector that a solver sees, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from esscher.icl.layer import Block, Parameters, tensors
from esscher.icl.tasks import LinearTask

__all__ = ["Coordinates", "flatten", "unflatten"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The vector that the solver sees: all parameters, or d + 1 numbers where the flow keeps U11
    diagonal.

    When U11(0), Sigma, W and the queries' covariance share an eigenbasis, the columns of ``basis``,
    so do U11(t) and every gradient.
    """

    like: Parameters
    basis: Floats | None

    @classmethod
    def of(cls, task: LinearTask, start: Parameters) -> Coordinates:
        if not isinstance(start, Block):
            return cls(start, None)
        matrices = [start.U11.detach().double().numpy(), task.sigma.numpy(), task.task_cov.numpy()]
        if task.shifted:
            matrices.append(task.query_sigma.numpy())
        # a mixture, so that its eigenbasis is that of all
        mixture = np.tensordot(
            np.array((1.0, 0.7310, 0.5170, 0.2930)[: len(matrices)]), np.stack(matrices), axes=1
        )
        basis = np.linalg.eigh(0.5 * (mixture + mixture.T))[1]
        turned = [basis.T @ matrix @ basis for matrix in matrices]
        shared = all(
            np.abs(m - np.diag(np.diag(m))).max() <= 1e-13 * np.abs(m).max() for m in turned
        )
        return cls(start, basis if shared else None)

    def pull(self, params: Parameters) -> Floats:
        """Coordinates of parameters, or of a gradient."""
        if self.basis is None or not isinstance(params, Block):
            return flatten(params)
        U = params.U11.detach().double().numpy()
        return np.append(np.einsum("ik,ij,jk->k", self.basis, U, self.basis), float(params.v))

    def unpack(self, state: Floats) -> Parameters:
        if self.basis is None:
            return unflatten(state, self.like)
        U = (self.basis * state[:-1]) @ self.basis.T
        return Block(torch.from_numpy(U), torch.tensor(state[-1], dtype=torch.float64))


def flatten(params: Parameters) -> Floats:
    """All parameters in one vector."""
    return np.concatenate([tensor.detach().double().numpy().ravel() for tensor in tensors(params)])


def unflatten(state: Floats, like: Parameters) -> Parameters:
    """The inverse of ``flatten``, for the parametrisation of ``like``."""
    parts, first = [], 0
    for tensor in tensors(like):
        last = first + tensor.numel()
        parts.append(torch.from_numpy(state[first:last].copy()).reshape(tensor.shape))
        first = last
    return type(like)(*parts)
