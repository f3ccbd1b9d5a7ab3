"""Random state by name: what is drawn depends on what it is for, never on the batch, the worker or
the order.
"""

from __future__ import annotations

import hashlib
import json

import torch

__all__ = ["generator_for"]


def generator_for(experiment: str, seed: int, *key: str | int) -> torch.Generator:
    """A generator for one draw, seeded with the first 8 bytes of sha256 of (experiment, seed,
    *key).

    Keys in use: ("nested" or n, repeat, purpose). Distinct keys give unrelated streams; 1 and "1"
    are distinct. It lives on the CPU, so that the numbers are those of every device.
    """
    text = json.dumps([experiment, seed, *key], ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
