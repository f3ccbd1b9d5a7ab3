"""Softmax attention in its plainest form: the float64 reference of every test."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.inputs import as_positive, as_tensor, finite_result


def softmax_attention(
    q: Any, k: Any, v: Any, scale: Any = None, mask: Any = None
) -> Float64[Tensor, "*batch m d_v"]:
    """sum_j p_ij v_j with p_ij ~ exp(scale <q_i, k_j>), all scores at once in float64.

    ``scale`` None = 1/sqrt(width of q). ``mask``: booleans, true where query i may see key j.
    """
    q, k, v, scale, mask = attention_inputs(q, k, v, scale, mask)
    scores = scale * (q.double() @ k.double().mT)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out: Tensor = scores.softmax(dim=-1) @ v.double()
    return finite_result(out, "softmax_attention", "lower the scale or the size of q, k and v")


def attention_inputs(
    q: Any, k: Any, v: Any, scale: Any, mask: Any, *, default_scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, float, Tensor | None]:
    """Check what every attention function here is given: shapes, finiteness, scale, and that each
    query sees a key.
    """
    q, k, v = as_tensor(q, "q"), as_tensor(k, "k"), as_tensor(v, "v")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 2 or 0 in x.shape:
            raise ValueError(
                f"{name}: expected at least one row of at least one number, got shape"
                f" {tuple(x.shape)}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k: expected rows of one width, got {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k, v: expected one value for each key, got shapes {tuple(k.shape)} and"
            f" {tuple(v.shape)}"
        )
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(
            f"q, k: expected the same leading axes, got {tuple(q.shape[:-2])} and"
            f" {tuple(k.shape[:-2])}"
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1]) if default_scale is None else default_scale
    if mask is not None:
        mask = _check_mask(mask, (*q.shape[:-1], k.shape[-2]))
    return q, k, v, as_positive(scale, "scale"), mask


def _check_mask(mask: Any, shape: tuple[int, ...]) -> Tensor:
    visible = torch.as_tensor(mask)
    if visible.dtype != torch.bool:
        raise ValueError(
            f"mask: expected booleans, true where a query may see a key, got {visible.dtype}"
        )
    try:
        visible = visible.expand(shape)
    except RuntimeError as cause:
        raise ValueError(
            f"mask: expected a shape that broadcasts to {shape}, got {tuple(visible.shape)}"
        ) from cause
    blind = int((~visible.any(dim=-1)).sum())
    if blind:
        raise ValueError(
            f"mask: {blind} queries see no key, so attention is undefined there; leave them out or"
            " unmask a key"
        )
    return visible
