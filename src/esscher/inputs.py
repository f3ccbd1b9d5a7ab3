"""Public input becomes tensors and counts here, or a ValueError: what came, what was expected, what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["as_count", "as_counts", "as_positive", "as_tensor"]


def as_tensor(value: Any, name: str, *, ndim: int | None = None, last: int | None = None) -> Tensor:
    """A finite floating tensor. Python numbers and lists become float64; tensors keep their dtype and device.

    ``ndim`` fixes the number of axes, ``last`` the length of the last one.
    """
    if isinstance(value, Tensor):
        tensor = value
    elif isinstance(value, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(value)) if value.dtype.kind in "fiub" else _refuse(value, name)
    else:
        try:
            tensor = torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as cause:
            raise ValueError(f"{name}: expected numbers, got {type(value).__name__}: {cause}") from cause
    if not tensor.is_floating_point():
        raise ValueError(
            f"{name}: expected floating-point numbers, got {str(tensor.dtype).removeprefix('torch.')}; "
            "convert with .double() or .float()"
        )
    if ndim is not None and tensor.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} axes, got {tensor.ndim} (shape {tuple(tensor.shape)})")
    if last is not None and (tensor.ndim == 0 or tensor.shape[-1] != last):
        raise ValueError(f"{name}: expected rows of length {last}, got shape {tuple(tensor.shape)}")
    if not _is_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise ValueError(f"{name}: expected finite numbers, got {bad} NaN or infinite out of {tensor.numel()}")
    return tensor


def _is_finite(tensor: Tensor) -> bool:
    """One pass without a temporary the size of the tensor; NaN goes through aminmax."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _refuse(value: Any, name: str) -> Tensor:
    raise ValueError(f"{name}: expected floating-point numbers, got an array of dtype {value.dtype}")


def as_positive(value: Any, name: str) -> float:
    """A finite float above zero."""
    try:
        number = float(value)
    except (TypeError, ValueError) as cause:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}") from cause
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name}: expected a finite number above 0, got {number}")
    return number


def as_count(value: Any, name: str) -> int:
    """A whole number of at least 1; 1e12 counts as whole."""
    return int(as_counts([value], name)[0])


def as_counts(value: Any, name: str) -> npt.NDArray[np.int64]:
    """Whole numbers of at least 1, as a flat int64 array. Floats are taken when they are whole and below 2**53."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    numbers = np.atleast_1d(np.asarray(value))
    if numbers.dtype.kind not in "iuf":
        raise ValueError(f"{name}: expected whole numbers of at least 1, got {value!r}")
    if numbers.ndim != 1 or numbers.size == 0:
        raise ValueError(f"{name}: expected a number or a flat list of numbers, got shape {numbers.shape}")
    bad = ~np.isfinite(numbers) if numbers.dtype.kind == "f" else np.zeros(numbers.shape, dtype=bool)
    bad |= (numbers < 1) | (numbers > 2**53)
    if numbers.dtype.kind == "f":
        bad |= numbers != np.floor(numbers)
    if bad.any():
        raise ValueError(f"{name}: expected whole numbers from 1 to 2**53, got {numbers[bad][0]}")
    return numbers.astype(np.int64)
