"""What was kept: the tokens of a prompt, how many heads keep each, and what kinds they are."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from esscher.compress.choose import Choice
from esscher.compress.prompt import Prompt

FIRST = 4  # tokens at the beginning of a prompt
KINDS = ("first tokens", "punctuation", "numbers", "capitalised", "other")


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; its id where there is no tokenizer."""
    if tokenizer is None:
        return [str(i) for i in ids]

    def decoded(some: Sequence[int]) -> str:
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(some), **plain))

    found = [decoded(ids[:1])]
    for i in range(1, len(ids)):
        # a token by itself may lose the space before it
        before, both = decoded(ids[i - 1 : i]), decoded(ids[i - 1 : i + 1])
        found.append(both[len(before) :] if both.startswith(before) else decoded(ids[i : i + 1]))
    return found


def kind_of(piece: str, position: int) -> str:
    """One of KINDS: by position, then by the characters of a token, spaces left out."""
    text = piece.strip()
    if position < FIRST:
        return KINDS[0]
    if all(unicodedata.category(c)[0] in "PSZC" for c in text):
        return KINDS[1]
    if text[0].isnumeric():
        return KINDS[2]
    return KINDS[3] if text[0].isupper() else KINDS[4]


def kind_rows(prompt: Prompt, choice: Choice, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """For each kind its share of the kept keys and of all keys that the cache holds, over all
    layers and key-value heads.
    """
    held = torch.stack([prompt.held_by(place) for place in prompt.contexts]).sum(0).double()
    kept = torch.stack([rows.sum(0) for rows in choice.kept.values()]).sum(0).double()
    kinds = [kind_of(piece, position) for position, piece in enumerate(texts)]
    for kind in KINDS:
        own = torch.tensor([name == kind for name in kinds], device=held.device)
        shares = (float(rows[own].sum() / rows.sum()) for rows in (kept, held))
        yield {"kind": kind, **dict(zip(("kept_share", "held_share"), shares, strict=True))}


def token_rows(choice: Choice, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """For each token of the prompt, how many key-value heads of each layer keep it."""
    layers = sorted(choice.kept)
    counts: Tensor = torch.stack([choice.kept[layer].sum(0) for layer in layers], 1)
    heads = [len(choice.kept[layer]) for layer in layers]
    for position, (piece, row) in enumerate(zip(texts, counts.tolist(), strict=True)):
        yield {"position": position, "token": piece, "heads": row, "heads_all": heads}
