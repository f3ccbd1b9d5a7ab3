"""States to bytes and back: any tree of dataclasses, mappings, tensors, numbers, words and None, as
safetensors.

Tensors are stored under their place in the tree, ``.top.scores``; one more tensor holds the rest as
JSON. Of a symmetric matrix one half is stored. Classes are never read from the bytes: whoever reads
says what they are.
"""

from __future__ import annotations

import json
import types
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from safetensors.torch import load, save
from torch import Tensor

__all__ = ["pack", "unpack"]

TREE = "tree"  # places begin with a point, so that none is this one
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.bool,
    )
}


def pack(value: Any, single: Collection[str] = ()) -> bytes:
    """``single``: places of float64 tensors that are known no better than float32, and stored as
    that.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_tree("", value, tensors, frozenset(single)))
    _own_memory(tensors)
    tensors[TREE] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return save(tensors)


def unpack(data: bytes, kind: Any) -> Any:
    """``kind``: the class of what was packed, or classes by name where it was a mapping."""
    tensors = load(data)
    return _value("", json.loads(bytes(tensors[TREE].numpy())), kind, tensors)


def _tree(
    place: str, value: Any, tensors: dict[str, Tensor], single: frozenset[str]
) -> dict[str, Any]:
    if isinstance(value, Tensor):
        kind = {"tensor": str(value.dtype).removeprefix("torch.")}
        value = value.float() if place in single else value
        if _symmetric(value):
            upper = torch.triu_indices(*value.shape[-2:], device=value.device)
            value, kind = value[..., upper[0], upper[1]], kind | {"side": value.shape[-1]}
        tensors[place] = value.detach().cpu().contiguous()
        return kind
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {
            "of": {
                name: _tree(f"{place}.{name}", part, tensors, single)
                for name, part in value.items()
            }
        }
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(
        f"{place[1:]}: expected a dataclass, a mapping, a tensor, a number, a word or None, got"
        f" {type(value).__name__}"
    )


def _symmetric(value: Tensor) -> bool:
    """To the last digit, of at least two rows."""
    square = value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1
    return square and torch.equal(value, value.transpose(-1, -2))


def _own_memory(tensors: dict[str, Tensor]) -> None:
    """safetensors refuses tensors that share theirs."""
    taken: set[int] = set()
    for place, value in tensors.items():
        where = value.untyped_storage().data_ptr()
        if where in taken:
            tensors[place] = value.clone()
        taken.add(where)


def _value(place: str, tree: dict[str, Any], kind: Any, tensors: dict[str, Tensor]) -> Any:
    if "tensor" in tree:
        found = tensors[place].to(DTYPES[tree["tensor"]])
        return _whole(found, tree["side"]) if "side" in tree else found
    if "plain" in tree:
        return tree["plain"]
    kind = _structure(kind)
    whole = is_dataclass(kind)
    kinds = (
        get_type_hints(kind)
        if whole
        else dict.fromkeys(tree["of"], get_args(kind)[1])
        if get_origin(kind) is dict
        else kind
    )
    parts = {
        name: _value(f"{place}.{name}", part, kinds[name], tensors)
        for name, part in tree["of"].items()
    }
    return kind(**parts) if whole else parts


def _whole(upper: Tensor, side: int) -> Tensor:
    """Symmetric matrices from their upper halves, row by row."""
    row, column = torch.triu_indices(side, side, device=upper.device)
    whole = upper.new_empty(*upper.shape[:-1], side, side)
    whole[..., row, column] = upper
    whole[..., column, row] = upper
    return whole


def _structure(kind: Any) -> Any:
    """What a mapping of parts is of: a dataclass, the one of an optional one, or kinds by name."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (option for option in get_args(kind) if is_dataclass(option))
    return kind
