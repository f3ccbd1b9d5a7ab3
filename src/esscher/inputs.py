"""Public input becomes tensors and counts here, or a ValueError: what came, what was expected, what
to do.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_kind(value: Any, kind: type[Any], name: str) -> Any:
    """The value itself, if it is one of ours of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected esscher's {kind.__name__}, got {type(value).__name__}")
    return value


def as_tensor(value: Any, name: str, *, ndim: int | None = None, last: int | None = None) -> Tensor:
    """A finite floating tensor with ``ndim`` axes, the last of length ``last``. Python numbers and
    lists become float64; tensors and arrays keep their dtype; lists of tensors are stacked.
    """
    tensor = _read(value, name)
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{name}: expected a dense tensor, got layout {tensor.layout}; convert with .to_dense()"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name}: expected floating-point numbers (float16, bfloat16, float32, float64), "
            f"got {str(tensor.dtype).removeprefix('torch.')}; convert to float64 or float32"
        )
    if ndim is not None and tensor.ndim != ndim:
        raise ValueError(
            f"{name}: expected {ndim} axes, got {tensor.ndim} (shape {tuple(tensor.shape)})"
        )
    if last is not None and (tensor.ndim == 0 or tensor.shape[-1] != last):
        raise ValueError(f"{name}: expected rows of length {last}, got shape {tuple(tensor.shape)}")
    if not is_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ValueError(
            f"{name}: expected finite numbers, got {bad} NaN or infinite out of {tensor.numel()}"
        )
    return tensor


def as_attention(
    q: Any, k: Any, v: Any, scale: Any, *, heads: bool = False
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries (m, k), keys (N, k) and values (N, d_v) on one device, none empty; ``scale`` None =
    1/sqrt(width of q). ``heads``: behind the same leading axes, and with their gradients.
    """
    ndim = None if heads else 2
    q, k, v = (as_tensor(x, name, ndim=ndim) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if not heads:
        q, k, v = q.detach(), k.detach(), v.detach()
    shapes = f"got shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if min(q.ndim, k.ndim, v.ndim) < 2 or 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"q, k, v: expected at least one row of at least one number, {shapes}")
    if q.shape[-1] != k.shape[-1] or q.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"q, k: expected rows of one width and the same leading axes, {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k, v: expected one value for each key, {shapes}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v: expected one device, got {q.device}, {k.device}, {v.device}")
    return q, k, v, q.shape[-1] ** -0.5 if scale is None else as_positive(scale, "scale")


def _read(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    items = value if isinstance(value, list | tuple) else [value]
    try:
        if items and all(isinstance(item, Tensor) for item in items):
            return torch.stack(list(items))
        if not any(isinstance(item, np.ndarray) for item in items):
            return torch.as_tensor(value, dtype=torch.float64)
        if any(isinstance(item, np.ma.MaskedArray) for item in items):
            raise TypeError("torch has no masked arrays; fill it, or leave the rows out")
        array = np.asarray(value)
        wide = array.dtype == np.longdouble
        # torch reads native byte order and rising strides that may be written to; others are copied
        dtype = np.dtype(np.float64) if wide else array.dtype.newbyteorder("=")
        return torch.from_numpy(np.require(array, dtype, ["C", "W", "A"]))
    except (TypeError, ValueError, RuntimeError, OverflowError) as cause:
        raise ValueError(
            f"{name}: expected floating-point numbers, got {type(value).__name__}: {cause}"
        ) from cause


def finite_result(result: Tensor, name: str, remedy: str) -> Tensor:
    """A computed tensor as it is, or a ValueError where it left the floating range."""
    if is_finite(result):
        return result
    bad = int((~torch.isfinite(result)).sum())
    raise ValueError(
        f"{name}: {bad} of {result.numel()} numbers leave the range of"
        f" {str(result.dtype).removeprefix('torch.')}; {remedy}"
    )


def is_finite(tensor: Tensor) -> bool:
    """One pass without a temporary the size of the tensor; NaN goes through aminmax."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def as_positive(value: Any, name: str) -> float:
    """A finite float above zero."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as cause:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}") from cause
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name}: expected a finite number above 0, got {number}")
    return number


def as_count(value: Any, name: str) -> int:
    """A whole number of at least 1; 1e12 counts as whole."""
    return int(as_counts([value], name)[0])


def as_counts(value: Any, name: str) -> npt.NDArray[np.int64]:
    """Whole numbers of at least 1, as a flat int64 array; floats where they are whole."""
    if isinstance(value, Tensor):
        value = value.tolist()
    elif isinstance(value, list | tuple):
        value = [item.tolist() if isinstance(item, Tensor) else item for item in value]
    try:
        numbers = np.atleast_1d(np.asarray(value))
    except ValueError:  # lists of unequal length
        numbers = np.empty(0)
    if numbers.ndim != 1 or numbers.size == 0 or numbers.dtype.kind not in "iuf":
        raise ValueError(
            f"{name}: expected whole numbers of at least 1, alone or in a flat list, got {value!r}"
        )
    if numbers.dtype.kind == "f":
        numbers = numbers.astype(np.float64)  # 2**53 is not a float16
    bad = ~((numbers >= 1) & (numbers <= 2**53) & (numbers == np.floor(numbers)))  # NaN is bad
    if bad.any():
        raise ValueError(f"{name}: expected whole numbers from 1 to 2**53, got {numbers[bad][0]:g}")
    return numbers.astype(np.int64)


def generator_for(experiment: str, seed: int, *key: str | int) -> torch.Generator:
    """A generator for one draw, seeded with the first 8 bytes of sha256 of (experiment, seed,
    *key); on the CPU, so that the numbers are those of every device.
    """
    text = json.dumps([experiment, seed, *key], ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


POINTS_PER_DECADE = 4
MOST_POINTS = 10_000  # of a ladder


def parse_ladder(text: Any, name: str = "n") -> npt.NDArray[np.int64]:
    """Increasing whole numbers from "1e3:1e12" (4 a decade), "1e3:1e12:40", "100,1000", a number
    or a list; ``name`` stands in the message of an error.
    """
    numbers = text
    if isinstance(text, str):
        try:
            numbers = [float(part) for part in re.split("[:,]", text)]
        except ValueError as cause:
            raise ValueError(
                f"{name}: expected numbers such as 100,1000 or 1e3:1e12, got {text!r}"
            ) from cause
    ladder = as_counts(numbers, name)
    if isinstance(text, str) and ":" in text:
        if len(ladder) not in (2, 3) or ladder[0] > ladder[1]:
            raise ValueError(
                f"{name}: expected first:last or first:last:points, first below last, got {text!r}"
            )
        first, last = (float(end) for end in ladder[:2])
        spaced = max(2, round(POINTS_PER_DECADE * math.log10(last / first)) + 1)
        points = int(ladder[2]) if len(ladder) == 3 else spaced
        if points > MOST_POINTS:
            raise ValueError(f"{name}: expected at most {MOST_POINTS} points, got {points}")
        ladder = np.unique(np.geomspace(first, last, points).round().astype(np.int64))
    if ladder.size > MOST_POINTS:
        raise ValueError(f"{name}: expected at most {MOST_POINTS} points, got {ladder.size}")
    if (np.diff(ladder) <= 0).any():
        raise ValueError(f"{name}: expected increasing numbers, got {ladder.tolist()}")
    return ladder
