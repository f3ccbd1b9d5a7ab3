"""One attention layer that reads a prompt of labelled tokens and predicts the label of a query."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from esscher.icl.tasks import Prompts
from esscher.inputs import as_count, as_tensor

KINDS = ("softmax", "linear")


@dataclass(frozen=True, eq=False, init=False)
class UV:
    """Score matrix and value map, both (d+1) x (d+1): token z scores <z, U z_q> and has value V z.

    The prediction is the last coordinate of the output, so of V only the last row acts. [S]: U =
    K^T Q, section 4.
    """

    U: Float[Tensor, "e e"]
    V: Float[Tensor, "e e"]

    def __init__(self, U: Any, V: Any) -> None:
        _set(self, U=U, V=V)

    @property
    def dim(self) -> int:
        """Dimension d of the covariates."""
        return int(self.U.shape[0]) - 1

    def uv(self) -> UV:
        return self


@dataclass(frozen=True, eq=False, init=False)
class KQV:
    """Key and query maps, both k x (d+1), and the value map: U = K^T Q."""

    K: Float[Tensor, "k e"]
    Q: Float[Tensor, "k e"]
    V: Float[Tensor, "e e"]

    def __init__(self, K: Any, Q: Any, V: Any) -> None:
        _set(self, K=K, Q=Q, V=V)

    def uv(self) -> UV:
        return UV(self.K.mT @ self.Q, self.V)


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

    @property
    def dim(self) -> int:
        return int(self.U11.shape[0])

    def uv(self) -> UV:
        d = self.dim
        U = torch.zeros(d + 1, d + 1, dtype=self.U11.dtype)
        V = torch.zeros_like(U)
        return UV(
            U.index_put((torch.arange(d)[:, None], torch.arange(d)), self.U11),
            V.index_put((torch.tensor(d), torch.tensor(d)), self.v.to(U)),
        )


Parameters = UV | KQV | OVKQ | Block


def _set(params: Any, **matrices: Any) -> None:
    """Write the fields of a frozen dataclass once; tensors go through as they are, so that
    gradients do.
    """
    for name, value in matrices.items():
        object.__setattr__(
            params, name, value if isinstance(value, Tensor) else as_tensor(value, name)
        )


def as_uv(params: Parameters) -> UV:
    """Any of the parametrisations as (U, V), or a ValueError when the shapes do not fit."""
    if not isinstance(params, Parameters):
        raise ValueError(f"params: expected UV, KQV, OVKQ or Block, got {type(params).__name__}")
    uv = params.uv()
    e = uv.U.shape[0]
    if uv.U.shape != (e, e) or uv.V.shape != (e, e) or e < 2:
        raise ValueError(
            f"params: expected U and V square of one size d + 1 >= 2, got {tuple(uv.U.shape)} and"
            f" {tuple(uv.V.shape)}"
        )
    return uv


def tensors(params: Parameters) -> list[Tensor]:
    """The tensors of a parametrisation, in the order of its fields."""
    return [getattr(params, field.name) for field in fields(params)]


def default_weights(dim: Any, generator: torch.Generator | None = None, width: Any = None) -> OVKQ:
    """O, V, K, Q as ``torch.nn.Linear`` draws its weights, uniform on +-1/sqrt(inputs), in that
    order; float64.

    ``dim`` is the dimension d of the covariates, ``width`` the inner dimension, d + 1 unless given.
    [S], appendix A.1.
    """
    e = as_count(dim, "dim") + 1
    inner = e if width is None else as_count(width, "width")
    shapes = ((e, inner), (inner, e), (inner, e), (inner, e))
    drawn = []
    for shape in shapes:
        weight = torch.empty(shape, dtype=torch.float64)
        torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        drawn.append(weight)
    return OVKQ(*drawn)


def predict(
    params: Parameters, prompts: Prompts, kind: str = "softmax", query_inside: bool = False
) -> Float[Tensor, B * k]:
    """The layer's prediction of each query's label; differentiable in the parameters.

        softmax: sum_l p_l r^T z_l, p_l ~ exp<z_l, U z_q>
        linear: (1/L) sum_l <z_l, U z_q> r^T z_l

    r is the last row of V and z_q = (x_q, 0); for labels of k numbers the last k rows, and k zeros.
    ``query_inside`` adds z_q to the prompt, (L mu_L + delta)/(L + 1) [S, Remark 3.2]. Computed in
    the dtype of the prompts.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    uv = as_uv(params)
    tokens, z_q = prompts.tokens, prompts.query_token
    dim, labels = prompts.query.shape[-1], prompts.target.numel() // len(prompts.target)
    if dim + labels != uv.U.shape[0]:
        raise ValueError(
            f"params and prompts: the layer takes d = {uv.U.shape[0] - labels}, the prompts have d"
            f" = {dim}"
        )
    if query_inside:
        tokens = torch.cat([tokens, z_q[:, None]], dim=1)
    scores = torch.einsum("ble,be->bl", tokens, z_q @ uv.U.to(tokens.dtype).mT)
    values = tokens @ uv.V[-labels:].to(tokens.dtype).mT
    weights = scores.softmax(dim=-1) if kind == "softmax" else scores / scores.shape[-1]
    return (weights[..., None] * values).sum(dim=1).reshape(prompts.target.shape)
