"""A device that computes on the CPU and behaves like an accelerator: what leaves it is seen.

A tensor on it holds a tensor of the CPU that nothing else has. As on CUDA, an operation on tensors
of two devices raises (numbers without axes and indices apart), ``numpy()`` raises, and so does
drawing with a generator of another device. Numbers that are read (``.cpu()``, ``.tolist()``,
``.item()``) are counted by the function of esscher that read them.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "remote"
PACKAGE = str(Path(__file__).parents[1] / "src" / "esscher")
LIBRARY = torch.library.Library("aten", "IMPL")
aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default)
COPIES = (aten.copy_.default, aten._foreach_copy_.default)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


def make() -> None:
    """Let torch know the device: before the first backward pass of the process, which counts
    devices.
    """

    class Module:  # what torch asks of a backend
        def is_initialized(self) -> bool:
            return True

        def is_available(self) -> bool:
            return True

        def current_device(self) -> int:
            return 0

        def device_count(self) -> int:
            return 1

        def _is_in_bad_fork(self) -> bool:
            return False

        def manual_seed_all(self, seed: int) -> None:
            pass

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    for name in ("empty.memory_format", "empty_strided"):  # torch.tensor() is blind to modes

        def empty(*sizes: Any, device: Any = None, name: str = name, **kind: Any) -> Placed:
            packet, _, overload = name.partition(".")
            made = getattr(getattr(aten, packet), overload or "default")
            return Placed(made(*sizes, device="cpu", **kind))

        LIBRARY.impl(name, empty, "PrivateUse1")

    def filled(x: Tensor, into: Placed, wait: bool = False) -> Placed:
        into.held.copy_(x)
        return into

    LIBRARY.impl("_copy_from", filled, "PrivateUse1")


def device() -> torch.device:
    return torch.device(NAME, 0)


class Placed(Tensor):
    """A tensor on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Placed:
        return Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device(),
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, None)

    def __repr__(self) -> str:
        return f"{self.held!r} on the {NAME}"

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Watch(TorchDispatchMode):
    """Inside, the device is there. By the function that read numbers: ``most`` of them at once, and
    how many ``times``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[str] = Counter()
        self.times: Counter[str] = Counter()

    def left(self, numbers: int) -> None:
        where = _reader()
        self.most[where] = max(self.most[where], numbers)
        self.times[where] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self)


def _run(func: Any, args: Any, kwargs: dict[str, Any], watch: Watch | None) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    on = [x for x in tensors if isinstance(x, Placed)]
    asked = kwargs.get("device")
    target = torch.device(asked).type if asked is not None else None
    if not on and target != NAME:
        return func(*args, **kwargs)
    _check(func, args, kwargs, tensors, on)
    leaves = func in READS or (on and target == "cpu")
    if func in COPIES and not isinstance(args[0], Placed):
        leaves = True
    if leaves and watch is not None:
        watch.left(1 if func in READS else sum(x.numel() for x in on))
    own = tree_map_only(Placed, lambda x: x.held, (args, kwargs))
    if target == NAME:
        own[1]["device"] = torch.device("cpu")
    found = func(*own[0], **own[1])
    if leaves:
        return args[0] if func in COPIES else found
    found = tree_map_only(Tensor, Placed, found)
    return return_and_correct_aliasing(func, args, kwargs, found)


def _check(
    func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], on: list[Placed]
) -> None:
    """Raise what CUDA would raise."""
    drawn = kwargs.get("generator")
    if drawn is not None and drawn.device.type != NAME:
        raise RuntimeError(f"{func}: expected a generator on the {NAME}, got {drawn.device}")
    strange = [x for x in tensors if not isinstance(x, Placed)]
    if func in INDEXED:
        if not isinstance(args[0], Placed):
            raise RuntimeError(f"{func}: indices on the {NAME}, the tensor on {args[0].device}")
        strange = strange and [x for x in args[2:3] if not isinstance(x, Placed) and x.ndim]
    if func in COPIES or not on:
        return
    if any(x.ndim or torch.Tag.pointwise not in func.tags for x in strange):
        places = {str(x.device) for x in tensors}
        raise RuntimeError(f"{func}: expected all tensors on one device, got {sorted(places)}")


def _reader() -> str:
    """file:function of esscher that is running."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file[len(PACKAGE) + 1 :]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


def place(x: Any) -> Any:
    """Tensors inside a structure, on the device."""
    return tree_map_only(Tensor, lambda t: t.to(device()), x)
