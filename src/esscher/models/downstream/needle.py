"""A fact planted in real text: a sentence at some depth of a prefill, asked for again where the
text ends.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from esscher.models.downstream.context import DownstreamContext
from esscher.models.downstream.readings import Outcome

__all__ = ["Needle", "plant"]

PLACES = (
    "Lisbon",
    "Oslo",
    "Cairo",
    "Lima",
    "Dublin",
    "Prague",
    "Havana",
    "Warsaw",
    "Athens",
    "Geneva",
)
FACT = " The secret code of {place} is {number}."
QUESTION = "\n\nThe secret code of {place} is"
DIGITS = 5


class Needle:
    """``ids`` (1, T): text with the fact in it, the question and the answer; the prefill has
    ``tokens`` of them.
    """

    def __init__(self, ids: Tensor, tokens: int, answer: Tensor) -> None:
        self.ids, self.tokens, self.answer = ids, tokens, answer

    def found(self, outcome: Outcome) -> float:
        """1 where every token of the answer is the likeliest, those before it given; else 0."""
        said = outcome.rows[-len(self.answer) - 1 : -1].argmax(-1)
        return float(bool((said == self.answer).all()))


def plant(source: DownstreamContext, number: int) -> Needle:
    """The needle of this number: its text, depth, place and code follow from the seed."""
    state = random.Random(source.spec.unit_seed({"needle": number}))
    named = {
        "place": PLACES[number % len(PLACES)],
        "number": "".join(str(state.randrange(10)) for _ in range(DIGITS)),
    }
    written = [text.format(**named) for text in (FACT, QUESTION, QUESTION + " {number}")]
    fact, asked, full = (_tokens(source.loaded.tokenizer, text) for text in written)
    answer = full[len(asked) :]
    if not answer or full[: len(asked)] != asked or len(fact) >= source.prefill // 2:
        raise ValueError(
            f"needles: a fact of {len(fact)} tokens does not fit a prefill of {source.prefill}; use"
            " a longer --window"
        )
    text = source.ids(int(source.texts[number % len(source.texts)]))[0].tolist()
    depth = (number + 0.5) / max(1, source.spec.needles)
    place = 1 + int(depth * (source.prefill - len(fact) - 1))
    ids = [*text[:place], *fact, *text[place : source.prefill - len(fact)], *full]
    return Needle(
        torch.tensor([ids], device=source.loaded.device), source.prefill, torch.tensor(answer)
    )


def _tokens(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found
