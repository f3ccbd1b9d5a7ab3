"""The random inputs of one call: plausible numbers, extreme ones, junk, and the same numbers in
every form a user may give.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

import esscher as es
from tests.fuzz.outcome import call, same_outcome

__all__ = ["HALVES", "Draw"]

T = TypeVar("T")
Array = np.ndarray

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


class Draw:
    """One call's inputs, from (seed, family, index) alone.

    ``junk``: the name of an argument that was spoilt, so that the call must be refused.
    ``extreme``: numbers so large, so small or so odd that a refusal is a fair answer; without
    either a refusal is a finding.
    """

    def __init__(self, seed: int, family: str, index: int) -> None:
        self.rng = np.random.default_rng([seed, zlib.crc32(family.encode()), index])
        self.junk: str | None = None
        self.extreme: str | None = None
        self.called: set[str] = set()
        self.checks = 0

    # ---- numbers
    # ------------------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, choices: Sequence[T], p: Sequence[float] | None = None) -> T:
        return choices[int(self.rng.choice(len(choices), p=p))]

    def whole(self, low: int, high: int) -> int:
        """A whole number from low to high, small ones more often."""
        return int(
            np.clip(np.floor(np.exp(self.rng.uniform(np.log(low), np.log(high + 1)))), low, high)
        )

    def size(self, usual: float = 1.0, odds: float = 0.12) -> float:
        """A magnitude: around ``usual``, or with these odds anywhere from 1e-300 to 1e300."""
        if self.chance(odds):
            exponent = (
                self.rng.uniform(-300, 300) if self.chance(0.5) else self.rng.uniform(-12, 12)
            )
            self.extreme = f"size 1e{exponent:.0f}"
            return float(10.0**exponent)
        return float(usual * np.exp(self.rng.normal(0.0, 0.7)))

    def rows(self, n: int, dim: int, size: float = 1.0) -> Array:
        """n rows of numbers of this size; sometimes repeated, zero, or far from 0."""
        table = self.rng.standard_normal((n, dim)) * size
        kind = self.rng.random()
        if kind < 0.08:
            table = table[self.rng.integers(0, max(1, n // 3), n)]  # duplicated rows
        elif kind < 0.12:
            table = table + 100 * size * self.rng.standard_normal(dim)  # a common offset
        elif kind < 0.15:
            table = np.zeros_like(table)
        elif kind < 0.18:
            table = np.round(table / size) * size  # ties
        return table

    def covariance(self, dim: int, size: float = 1.0) -> Array:
        """Full rank, singular, diagonal, of one direction, or zero."""
        rank = self.pick([dim, max(1, dim // 2), 1, 0], p=[0.7, 0.15, 0.1, 0.05])
        factor = self.rng.standard_normal((dim, rank)) * np.sqrt(size / dim)
        cov = factor @ factor.T
        if self.chance(0.2):
            cov = np.diag(np.diagonal(cov))
        return np.asarray(cov)

    def counts(self, most: int = 2**53, length: int = 4) -> list[int]:
        """Increasing token numbers, mostly small."""
        top = self.pick([30, 1000, 10**6, 2**53], p=[0.5, 0.25, 0.15, 0.1])
        found = {self.whole(1, min(top, most)) for _ in range(self.whole(1, length))}
        return sorted(found)

    # ---- forms
    # ------------------------------------------------------------------------------------------

    def dtype(self) -> torch.dtype:
        return self.pick(DTYPES, p=[0.5, 0.25, 0.15, 0.1])

    def given(
        self, table: Array, dtype: torch.dtype = torch.float64, *, lists: bool = True
    ) -> tuple[Any, Array]:
        """The numbers in some form of this dtype, and as float64 after rounding to it.

        Numbers that the dtype cannot hold become its largest: the call is then extreme.
        """
        with np.errstate(over="ignore"):
            biggest = torch.finfo(dtype).max
            if table.size and np.abs(table).max() > biggest:
                self.extreme = f"beyond {dtype}"
                table = np.clip(table, -biggest, biggest)
        tensor = torch.from_numpy(np.array(table, dtype=np.float64)).to(dtype)
        exact = tensor.double().numpy().copy()
        forms: list[Callable[[torch.Tensor], Any]] = [
            lambda x: x,
            lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
            lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
            lambda x: torch.cat([x, x])[: len(x)] if x.ndim else x,
            lambda x: x.clone().requires_grad_(),
            lambda x: x[:1].expand_as(x) if x.ndim > 1 and bool((x == x[:1]).all()) else x,
        ]
        if dtype == torch.float64 and lists:
            forms += [lambda x: x.tolist(), lambda x: tuple(x.tolist()) if x.ndim else x.item()]
        if dtype in (torch.float64, torch.float32, torch.float16):
            forms += [
                lambda x: x.numpy(),
                lambda x: np.asfortranarray(x.numpy()),
                lambda x: _backwards(x.numpy()),
            ]
        form = forms[0] if self.chance(0.4) else self.pick(forms)
        return form(tensor), exact

    # ---- junk
    # ------------------------------------------------------------------------------------------

    def spoil(
        self, arguments: dict[str, Any], kinds: dict[str, str], odds: float = 0.08
    ) -> dict[str, Any]:
        """With these odds, one argument replaced by junk of its kind: a key of ``_JUNK``, "rows"
        being rows of one width.
        """
        if not self.chance(odds):
            return arguments
        name = self.pick(sorted(set(kinds) & set(arguments)))
        value = self.pick(_JUNK[kinds[name]])(arguments[name])
        if value is arguments[name]:
            return arguments
        self.junk = f"{name} = {_short(value)}"
        return arguments | {name: value}

    # ---- calls
    # ------------------------------------------------------------------------------------------

    def public(self, name: str, *args: Any, **options: Any) -> Any:
        """Call ``es.name``; what has a class of its own in ``es`` counts as covered when it comes
        back.
        """
        self.called.add(name)
        function: Any = es
        for part in name.split("."):
            function = getattr(function, part)
        result = call(function, *args, **options)
        self.called.add(type(result).__name__)
        return result

    def method(self, thing: Any, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of a public object, or read its property."""
        return call(
            lambda: (
                getattr(thing, name)(*args, **options) if args or options else _read(thing, name)
            )
        )

    def agree(self, what: str, got: Any, expected: Any, tolerance: Any) -> None:
        same_outcome(what, got, expected, tolerance)
        self.checks += 1


def _read(thing: Any, name: str) -> Any:
    value = getattr(thing, name)
    return value() if callable(value) else value


def _backwards(array: Array) -> Array:
    """The same numbers, stored in reverse and read-only."""
    stored = np.ascontiguousarray(array[::-1]) if array.ndim else array
    stored.flags.writeable = False
    return stored[::-1] if array.ndim else stored


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) < 60 else text[:57] + "..."


def _with(number: float) -> Callable[[Any], Any]:
    """The same array with one entry that is not a finite number."""

    def spoilt(value: Any) -> Any:
        tensor = _array(value).double().clone(memory_format=torch.contiguous_format)
        tensor.view(-1)[tensor.numel() // 2] = number
        return tensor

    return spoilt


def _array(value: Any) -> torch.Tensor:
    tensor = (
        value.detach()
        if isinstance(value, torch.Tensor)
        else torch.as_tensor(np.array(value, dtype=np.float64))
    )
    return tensor if tensor.ndim else tensor[None]


_JUNK: dict[str, list[Callable[[Any], Any]]] = {
    "array": [
        _with(np.nan),
        _with(np.inf),
        lambda x: _array(x)[..., :0],
        lambda x: "text",
        lambda x: object(),
        lambda x: {"a": 1},
        lambda x: _array(x).to(torch.complex64),
        lambda x: torch.ones(_array(x).shape, dtype=torch.int64),
        lambda x: [[1.0, 2.0], [3.0]],
        lambda x: np.array([["a"]]),
    ],
    "values": [
        lambda x, y=y: y
        for y in ([np.nan], [-1.0], [np.inf], "text", object(), {}, [1e9], np.array(["a"]))
    ],
    "rows": [
        _with(np.nan),
        lambda x: _array(x)[..., :0],
        lambda x: torch.cat([_array(x), _array(x)[..., :1]], dim=-1),
        lambda x: 3.0,
    ],
    "positive": [
        lambda x, y=y: y for y in (0.0, -1.0, np.nan, np.inf, "text", [1.0, 2.0], {}, object(), 1j)
    ],
    "counts": [
        lambda x, y=y: y
        for y in (0, [], [3, -1], [1.5], [np.nan], "12", [[1, 2]], 2**60, {}, [np.inf], True)
    ],
    "any counts": [lambda x, y=y: y for y in (0, -3, 1.5, np.nan, "12", 2**60, {}, np.inf, True)],
    "count": [
        lambda x, y=y: y for y in (0, -1, 1.5, np.nan, "12", [1, 2], 2**60, {}, np.inf, True)
    ],
    "choice": [lambda x, y=y: y for y in ("nonsense", 3, "", [], 1.5)],
    "measure": [lambda x, y=y: y for y in ("text", 3, None, [1.0])],
    "head": [lambda x, y=y: y for y in ("text", 3, None, [1.0])],
    "curve": [lambda x, y=y: y for y in ("text", 3, None, [1.0])],
}
