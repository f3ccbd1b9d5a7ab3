"""One attention layer that reads a prompt of labelled tokens and predicts the label of a query."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from esscher.icl.tasks import Prompts
from esscher.inputs import as_count, as_tensor

Floats = npt.NDArray[np.float64]
KINDS = ("softmax", "linear")


def _set(params: Any, **matrices: Any) -> None:
    """Write the fields of a frozen dataclass once; tensors stay as they are, so that gradients
    do.
    """
    for name, value in matrices.items():
        given = value if isinstance(value, Tensor) else as_tensor(value, name)
        object.__setattr__(params, name, given)


@dataclass(frozen=True, eq=False, init=False)
class UV:
    """Score matrix and value map, both (d+1) x (d+1): token z scores <z, U z_q> and has value V z.

    The prediction is the last coordinate of the output, so only the last row of V acts, and the
    last column of U meets the query's masked label. [S]: U = K^T Q, section 4.
    """

    U: Float[Tensor, "e e"]
    V: Float[Tensor, "e e"]

    def __init__(self, U: Any, V: Any) -> None:
        _set(self, U=U, V=V)

    def uv(self) -> UV:
        return self

    def pull(self, by_U: Tensor, by_V: Tensor) -> UV:
        """The gradient in these parameters of a function with these gradients in U and V."""
        return UV(by_U, by_V)


@dataclass(frozen=True, eq=False, init=False)
class OVKQ:
    """Output map (d+1) x m, value map m x (d+1), key and query maps k x (d+1): U = K^T Q, V = O V.
    [S], appendix A.1.
    """

    O: Float[Tensor, "e m"]
    V: Float[Tensor, "m e"]
    K: Float[Tensor, "k e"]
    Q: Float[Tensor, "k e"]

    def __init__(self, O: Any, V: Any, K: Any, Q: Any) -> None:
        _set(self, O=O, V=V, K=K, Q=Q)

    def uv(self) -> UV:
        return UV(self.K.mT @ self.Q, self.O @ self.V)

    def pull(self, by_U: Tensor, by_V: Tensor) -> OVKQ:
        return OVKQ(by_V @ self.V.mT, self.O.mT @ by_V, self.Q @ by_U.mT, self.K @ by_U)


@dataclass(frozen=True, eq=False, init=False)
class Block:
    """Block form of [S], Assumption 5.1, which gradient flow keeps: U = [[U11, 0], [0, 0]], V =
    [[0, 0], [0, v]].
    """

    U11: Float[Tensor, "d d"]
    v: Float[Tensor, ""]

    def __init__(self, U11: Any, v: Any) -> None:
        _set(self, U11=U11, v=v)
        if not isinstance(v, Tensor):  # a plain number has the precision of the matrix beside it
            object.__setattr__(self, "v", self.v.to(self.U11))

    def uv(self) -> UV:
        U = torch.nn.functional.pad(self.U11, (0, 1, 0, 1))
        V = torch.zeros_like(U)
        return UV(U, V.index_put((torch.tensor(-1), torch.tensor(-1)), self.v.to(U)))

    def pull(self, by_U: Tensor, by_V: Tensor) -> Block:
        return Block(by_U[:-1, :-1], by_V[-1, -1])


Parameters = UV | OVKQ | Block


def tensors(params: Parameters) -> list[Tensor]:
    """The tensors of a parametrisation, in the order of its fields."""
    return [getattr(params, field.name) for field in fields(params)]


def flatten(params: Parameters) -> Floats:
    """All parameters in one vector."""
    return np.concatenate([tensor.detach().double().numpy().ravel() for tensor in tensors(params)])


def unflatten(state: Floats | Tensor, like: Parameters) -> Any:
    """The inverse of ``flatten``, for the parametrisation of ``like``; a tensor keeps its graph."""
    vector = state if isinstance(state, Tensor) else torch.from_numpy(state.copy())
    own = tensors(like)
    parts = torch.split(vector, [tensor.numel() for tensor in own])
    return type(like)(*(part.view_as(tensor) for part, tensor in zip(parts, own, strict=True)))


def default_weights(dim: Any, generator: torch.Generator | None = None) -> OVKQ:
    """O, V, K, Q of inner dimension d + 1 as ``torch.nn.Linear`` draws its weights, uniform on
    +-1/sqrt(inputs), in that order; float64. [S], appendix A.1.
    """
    e = as_count(dim, "dim") + 1
    drawn = [torch.empty(e, e, dtype=torch.float64) for _ in range(4)]
    for weight in drawn:
        torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    return OVKQ(*drawn)


def predict(params: Parameters, prompts: Prompts, kind: str = "softmax") -> Float[Tensor, " B"]:
    """The layer's prediction of each query's label; differentiable in the parameters.

        softmax: sum_l p_l r^T z_l, p_l ~ exp<z_l, U z_q>
        linear: (1/L) sum_l <z_l, U z_q> r^T z_l

    r is the last row of V and z_q = (x_q, 0). Computed in the dtype of the prompts.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    uv = params.uv()
    tokens, z_q = prompts.tokens, prompts.query_token
    own, dim = uv.U.shape[0] - 1, prompts.query.shape[-1]
    if own != dim:
        raise ValueError(
            f"params and prompts: the layer takes d = {own}, the prompts have d = {dim}"
        )
    scores = torch.einsum("ble,be->bl", tokens, z_q @ uv.U.to(tokens.dtype).mT)
    values = tokens @ uv.V[-1].to(tokens.dtype)
    weights = scores.softmax(dim=-1) if kind == "softmax" else scores / scores.shape[-1]
    return (weights * values).sum(dim=1)
