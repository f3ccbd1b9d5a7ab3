"""Which keys the queries of an attention call may see, row by row: nothing of size tokens x tokens
is held.

transformers makes a mask from a function of two positions, so its rows can be had one block at a
time. Models that only pass a mask on to their attention hand on a :class:`MaskTensor`; those that
calculate with it get its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["Mask", "MaskTensor", "causal_mask", "given_mask", "model_mask", "split_mask"]


@dataclass(frozen=True, eq=False)
class Mask:
    """Of ``queries`` and ``keys``; ``tell(at, keys)`` says which of these keys (a slice) the
    queries ``at`` see.

    What it says is (batch or 1, heads or 1, m, keys). ``causal``: key j is seen by query i when j
    <= i, and nothing else.
    """

    queries: int
    keys: int
    device: torch.device
    tell: Callable[[Tensor, slice], Tensor] = field(repr=False)
    causal: bool = False
    _reach: dict[tuple[int, int], slice] = field(default_factory=dict, init=False, repr=False)

    def rows(self, at: Int[Tensor, " m"]) -> Bool[Tensor, "batch heads m keys"]:
        """What the queries at these places see."""
        return self.tell(at, slice(0, self.keys))

    def whole(self) -> Bool[Tensor, "batch heads queries keys"]:
        """The mask spelled out."""
        return self.rows(torch.arange(self.queries, device=self.device))

    def block(self, start: int, stop: int) -> tuple[slice, Tensor]:
        """The keys from the first to the last that any of these queries sees, and which of them
        each one does.

        Found once and kept: the layers of a model share their masks.
        """
        at = torch.arange(start, stop, device=self.device)
        reach = self._reach.get((start, stop))
        if reach is None:
            reach = self._reach[start, stop] = _span(self.rows(at))
        return reach, self.tell(at, reach)


def _span(rows: Bool[Tensor, "batch heads m keys"]) -> slice:
    """From the first to the last key seen; one key where none is, and all where there are no
    numbers.
    """
    if rows.is_meta:
        return slice(0, rows.shape[-1])
    seen = rows.flatten(0, -2).any(0).nonzero()[:, 0]
    return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)


def causal_mask(queries: int, keys: int, device: torch.device) -> Mask:
    """Key j is seen by query i when j <= i."""

    def tell(at: Tensor, some: slice) -> Tensor:
        return (torch.arange(some.start, some.stop, device=device) <= at[:, None])[None, None]

    return Mask(queries, keys, device, tell, causal=queries == keys)


def given_mask(allowed: Bool[Tensor, "batch heads m n"], queries: int, keys: int) -> Mask:
    """A mask spelled out by the model; axes of length 1 stand for all."""
    spelled = allowed.expand(-1, -1, queries, keys)
    return Mask(queries, keys, allowed.device, lambda at, some: spelled[:, :, at, some])


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(allowed, bias) of a mask: boolean masks say who is seen; of float ones the very negative
    entries forbid, the rest adds.

    Float masks of transformers forbid by the smallest number of their dtype, sums of two of them
    reach minus infinity.
    """
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return mask, None
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    rest = mask.masked_fill(forbidden, 0.0)
    if mask.device.type == "meta":
        return ~forbidden, None
    allowed = ~forbidden if bool(forbidden.any()) else None
    return allowed, rest if bool(rest.any()) else None


def model_mask(**given: Any) -> Tensor | None:
    """Stands in for the function of transformers that makes the mask of a model's fused attention,
    with its arguments.

    None means that every key is seen; it is never left to be guessed whether a mask is causal.
    """
    from transformers.masking_utils import sdpa_mask

    # the first releases of transformers 5 say by cache_position where queries stand
    if "q_length" not in given:
        return sdpa_mask(**{**given, "allow_is_causal_skip": False})
    padding, causal = given.get("attention_mask"), given.get("allow_is_causal_skip", True)
    # whose numbers would be asked for
    causal = causal and not (padding is not None and padding.is_meta)
    skipped = (
        sdpa_mask(
            **{
                **given,
                "allow_is_causal_skip": causal,
                "mask_function": _anything,
                "use_vmap": False,
            }
        )
        is None
    )
    if skipped and not causal:
        return None
    queries, keys, device = (
        given["q_length"],
        given["kv_length"],
        torch.device(given.get("device", "cpu")),
    )
    asked, first = (
        {
            **given,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
            "q_offset": 0,
        },
        given["q_offset"],
    )

    def tell(at: Tensor, some: slice) -> Tensor:
        def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return given["mask_function"](batch, head, at[query] + first, key)

        length, offset = some.stop - some.start, given["kv_offset"] + some.start
        rows = sdpa_mask(
            **{
                **asked,
                # of a model without memory numbers are wanted too, and its padding has none
                "device": at.device,
                "attention_mask": None if padding is not None and padding.is_meta else padding,
                "q_length": len(at),
                "kv_length": length,
                "kv_offset": offset,
                "mask_function": seen,
            }
        )
        assert rows is not None
        return rows

    return MaskTensor(
        Mask(queries, keys, device, tell, causal=skipped and queries == keys), given["batch_size"]
    )


def _anything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask function that costs nothing, to ask whether a mask would be made at all."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)


class MaskTensor(Tensor):
    """A mask as models pass it on: a boolean tensor (batch, 1, queries, keys) without memory.

    Whatever is done with it besides asking for its shape, dtype and device is done with the mask
    spelled out.
    """

    mask: Mask
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    def __new__(cls, mask: Mask, batch: int) -> MaskTensor:
        shape = (batch, 1, mask.queries, mask.keys)
        made: MaskTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=mask.device
        )
        made.mask = mask
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(
            cls, lambda lazy: lazy.mask.whole().expand(lazy.shape), (args, kwargs or {})
        )
        return function(*args, **kwargs)
