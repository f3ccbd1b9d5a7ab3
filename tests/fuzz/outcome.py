"""What one call may end in: a checked result, a refusal of ours, or a finding."""

from __future__ import annotations

import inspect
import linecache
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import torch

import esscher as es

__all__ = ["Finding", "Refused", "call", "numbers", "same_outcome"]

SOURCE = str(Path(es.__file__).parent)
# Words a refusal may begin with that are no argument's name: what the numbers are, in the words of
# the documentation.
WORDS = {
    "theta",
    "attention",
    "hardmax",
    "pushforward",
    "scores",
    "tilt",
    "curve",
    "components",
    "tokens",
    "values",
}


class Finding(Exception):
    """A call that ended badly. ``kind``: "wrong", "silent" (NaN or inf without a word) or
    "internal" (not our exception).
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Refused(Exception):
    """A ValueError or TypeError of ours, in words."""


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a public call; Refused where it says in words what is wrong; a Finding for any
    other exception.

    A warning that reaches the caller is a finding too.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return function(*args, **options)
    # only while testing: annotated types are checked then
    except jaxtyping.TypeCheckError as exception:
        if "esscher" not in str(exception):
            raise
        raise Refused("type check") from exception
    except (ValueError, TypeError) as exception:
        flaw = _flaw(exception)
        if flaw:
            raise Finding(
                "internal", f"{flaw}: {type(exception).__name__}: {str(exception)[:200]}"
            ) from exception
        raise Refused(str(exception)) from exception
    except Exception as exception:
        raise Finding(
            "internal", f"{type(exception).__name__}: {str(exception)[:200]}"
        ) from exception


def _flaw(exception: Exception) -> str | None:
    """Why a ValueError is not one of ours: not raised by our own line, or without the name of what
    was wrong.
    """
    trace = exception.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_code.co_filename
    if not name.startswith(SOURCE):
        return f"raised in {Path(name).name}"
    if "raise" not in linecache.getline(name, trace.tb_lineno):
        return f"raised at {Path(name).name}:{trace.tb_lineno}, by no line of ours"
    before, colon, after = str(exception).partition(":")
    if not (colon and after.strip() and _argument_names() & set(re.findall(r"\w+", before))):
        return "the message does not begin with the name of the argument"
    return None


@cache
def _argument_names() -> frozenset[str]:
    """Names of every public callable, its methods and their arguments: a result that leaves the
    range has the first two.
    """
    names = set(WORDS) | set(es.__all__)
    for public in es.__all__:
        thing = getattr(es, public)
        parts = (
            [thing] + [part for _, part in inspect.getmembers(thing, callable)]
            if inspect.isclass(thing)
            else [thing]
        )
        names |= (
            {name for name, _ in inspect.getmembers(thing)} if inspect.isclass(thing) else set()
        )
        for part in parts:
            try:
                names |= set(inspect.signature(part).parameters)
            except (TypeError, ValueError):
                continue
    return frozenset(names - {"self", "args", "kwargs"})


def numbers(value: Any) -> np.ndarray:
    """A result as a float64 array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.float64)


def same_outcome(what: str, got: Any, expected: Any, tolerance: Any) -> None:
    """Finding unless ``got`` is finite and within ``tolerance`` (absolute, broadcast) of
    ``expected``, of its shape.
    """
    value, wanted = numbers(got), np.asarray(expected)
    if value.shape != wanted.shape:
        raise Finding("wrong", f"{what}: shape {value.shape}, expected {wanted.shape}")
    if not np.isfinite(value).all():
        raise Finding(
            "silent",
            f"{what}: {value[~np.isfinite(value)].flat[0]}, expected"
            f" {wanted[~np.isfinite(value)].flat[0]:.6g}",
        )
    excess = np.abs(value - wanted) - np.broadcast_to(
        np.asarray(tolerance, dtype=np.longdouble), wanted.shape
    )
    if not (excess <= 0).all():
        worst = np.unravel_index(
            int(np.argmax(np.where(np.isnan(excess), np.inf, excess))), excess.shape
        )
        allowed = np.broadcast_to(tolerance, wanted.shape)[worst]
        raise Finding(
            "wrong",
            f"{what}: {value[worst]:.12g}, expected {wanted[worst]:.12g} within {allowed:.2g}",
        )
