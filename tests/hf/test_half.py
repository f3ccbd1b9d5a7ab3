"""A model in bfloat16 is read and measured without a float32 copy of its weights: bytes of live
tensors are counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import esscher as es
from esscher.hf.loading import load_model
from tests.models.probe_runs import few_texts, save_tiny

WIDE = 16384  # of the feed-forward layers: weights are most of what there is


class Live(TorchDispatchMode):
    """``most``: bytes that live tensors of a dtype, made inside, held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = Counter[torch.dtype](), Counter[torch.dtype]()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen:
                    self.seen.add(key)
                    self.now[x.dtype] += size
                    weakref.finalize(storage, self.gone, key, x.dtype, size)
                    self.most[x.dtype] = max(self.most[x.dtype], self.now[x.dtype])
        return found

    def gone(self, key: int, dtype: torch.dtype, size: int) -> None:
        self.seen.discard(key)
        self.now[dtype] -= size


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_no_copy_in_float32(name: str, tmp_path: Path) -> None:
    wide = {"intermediate_size": WIDE, "max_position_embeddings": 128}
    folder = save_tiny(tmp_path / name, name, **wide)
    settings = {"max_tokens": 140, "window": 64, "queries": 8, "kept_queries": 4}
    with Live() as live:
        loaded = load_model(str(folder), dtype="bfloat16", with_head=True)
        weights = sum(4 * x.numel() for x in loaded.model.parameters())  # in float32
        assert {x.dtype for x in loaded.model.parameters()} == {torch.bfloat16}
        run = es.probe(str(folder), few_texts(), dtype="bfloat16", out=tmp_path / "run", **settings)
    assert (run.table("heads")["status"] == "ok").all()
    for dtype in (torch.float32, torch.float64):
        assert live.most[dtype] < weights / 2
