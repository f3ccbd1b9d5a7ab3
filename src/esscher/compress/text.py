"""One prompt, prefilled once, continued in full and then on what each rule keeps."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esscher.attention.head import horizon_of_covariances
from esscher.compress.choose import Choice
from esscher.compress.metrics import Outcome
from esscher.compress.price import head_errors, nats, smallest_share, with_cross_terms
from esscher.compress.prompt import Prompt, Settings
from esscher.compress.refit import chosen
from esscher.compress.session import Source
from esscher.compress.spec import parted
from esscher.hf.call import AttentionCall
from esscher.hf.gradients import DRAWS, drawn_gradients
from esscher.hf.interventions import Kept, check_acted
from esscher.keep.rule import Chance

QUANTILE = 0.95


@dataclass(frozen=True)
class Cell:
    """One way to keep keys: a rule, the split between heads, the share asked for (NaN: the one
    that a loss asks for), and which draw where chance decides.
    """

    rule: str
    split: str
    keep: float
    draw: int


class Text:
    """``ids`` (1, P + D): a prompt of ``tokens`` tokens, and its continuation."""

    def __init__(self, source: Source, ids: Tensor, tokens: int) -> None:
        self.source, self.ids, self.tokens = source, ids, tokens
        self.horizons = Horizons()
        spec = source.spec
        settings = Settings(spec.observe, spec.sinks, spec.recent, spec.replay, seed=spec.seed)
        started = time.perf_counter()
        self.prompt = Prompt(
            source.loaded.model,
            ids[:, :tokens],
            list(source.rules.values()),
            source.outputs,
            source.loaded.tokenizer,
            settings,
            sink=self.horizons.see,
        )
        self.seconds = time.perf_counter() - started
        self.calls: list[AttentionCall] = []
        result = self.decode(lambda call: None, sink=self.calls.append, hidden=True)
        self.full = self.outcome(result)
        self.limits = {call.layer: call.output()[0] for call in self.calls}  # (heads, D, width)
        self.gradients = (
            drawn_gradients(self.prompt.held, ids[:, tokens:], DRAWS, self._generator("gradients"))
            if spec.check
            else None
        )

    def _generator(self, name: str, draw: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(self.source.spec.unit_seed({name: draw}))

    def decode(self, decide: Any, **watch: Any) -> Any:
        with torch.no_grad():
            return self.prompt.held.decode(self.ids[:, self.tokens :], decide, **watch)

    def outcome(self, result: Any, known: dict[str, float] | None = None) -> Outcome:
        return Outcome("language", result.logits[0], self.ids[0, self.tokens + 1 :], known or {})

    def cells(self) -> Iterator[Cell]:
        """Every rule, split and size that leaves the rule a choice; chance is drawn several
        times.
        """
        source = self.source
        for text, rule in source.rules.items():
            by_chance = any(isinstance(part, Chance) for part in rule.parts)
            sure = sum(int(rows.sum()) for rows in self.prompt.sure(rule).values())
            for split in source.splits(rule):
                for share in source.spec.shares or (float("nan"),):
                    if share * self.keys * len(self.prompt.contexts) <= sure and share < 1:
                        continue
                    for draw in range(source.spec.draws if by_chance else 1):
                        yield Cell(text, split, share, draw)

    @property
    def keys(self) -> float:
        """Keys that the cache of a key-value head holds, on average."""
        return sum(self._held(layer) for layer, _ in self.prompt.contexts) / len(
            self.prompt.contexts
        )

    def _held(self, layer: int) -> int:
        return int(self.prompt.held_by((layer, 0)).sum())

    def kept(self, choice: Choice) -> float:
        """Keys that a key-value head keeps, on average."""
        total = 0
        for layer, kv in self.prompt.contexts:
            drops = layer in self.source.layers
            total += int(choice.kept[layer][kv].sum()) if drops else self._held(layer)
        return total / len(self.prompt.contexts)

    def choice(self, cell: Cell) -> Choice:
        """What a cell keeps; the same for the same cell and text."""
        rule, kl = self.source.rules[cell.rule], self.source.spec.kl
        _, end = parted(cell.rule)
        if kl is not None:
            return smallest_share(self.prompt, rule, cell.split, kl, end)[0]
        generator = self._generator("draw", cell.draw)
        return chosen(self.prompt, rule, cell.keep, cell.split, generator, end)

    def left(self, choice: Choice, call: AttentionCall) -> Kept | None:
        """What a layer's queries have left under a choice; None where the layer drops nothing."""
        return choice.left(call) if call.layer in self.source.layers else None

    def errors(self, choice: Choice) -> dict[int, Tensor]:
        """(heads, D, width) by layer: output on the kept keys minus that on all, at the full
        model's inputs.
        """
        dropping = self.source.layers
        return {
            call.layer: head_errors(call, choice, self.limits[call.layer])
            for call in self.calls
            if call.layer in dropping
        }

    def run(self, cell: Cell) -> tuple[Choice, Outcome, list[dict[str, Any]]]:
        """The continuation on what a cell keeps, and its error layer by layer."""
        choice = self.choice(cell)
        result = self.decode(lambda call: self.left(choice, call))
        errors = self.errors(choice)
        layers, worst = self._layers(errors)
        known = {"q95": worst, "kl_predicted": sum(row["nats"] for row in layers)}
        if self.gradients is not None:
            known["kl_cross"] = with_cross_terms(self.gradients, errors)
        kept = self.outcome(result, known)
        check_acted(any(bool(x.any()) for x in errors.values()), self.full.rows, kept.rows)
        return choice, kept, layers

    def behind(self, layer: int, rows: Tensor) -> Tensor:
        """(heads, D, d): what outputs of heads, or their errors, add to the residual stream."""
        output = self.source.outputs.get(layer)
        return rows if output is None else torch.bmm(rows, output.to(rows.dtype))

    def _layers(self, errors: Mapping[int, Tensor]) -> tuple[list[dict[str, Any]], float]:
        """A row for each layer: relative error of what attention adds to the stream, the same if
        heads erred independently, and predicted nats; then the error that QUANTILE of queries and
        heads stay below.
        """
        assert self.prompt.metric is not None
        cost = nats(self.prompt.metric, errors.items())
        rows, relative = [], []
        for layer, error in errors.items():
            behind, output = self.behind(layer, error), self.behind(layer, self.limits[layer])
            size = float(output.sum(0).square().sum()) or 1.0
            own = behind.square().sum(-1)
            heads = output.square().sum(-1).mean(1, keepdim=True)
            relative.append((own / heads.clamp_min(torch.finfo(own.dtype).tiny)).sqrt().flatten())
            rows.append(
                {
                    "layer": layer,
                    "error": (float(behind.sum(0).square().sum()) / size) ** 0.5,
                    "independent": (float(own.sum()) / size) ** 0.5,
                    "nats": float(cost[layer].sum()),
                }
            )
        worst = float(torch.cat(relative).double().quantile(QUANTILE)) if relative else 0.0
        return rows, worst


class Horizons:
    """A sink: the two-sided horizon of every head on one text, scale ||Sigma_k^{1/2}
    Sigma_q^{1/2}||.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], float] = {}

    def see(self, call: AttentionCall) -> None:
        keys = [_covariance(head) for head in call.key[0]]
        for i, head in enumerate(call.query[0]):
            found = horizon_of_covariances(keys[i // call.shared], _covariance(head), call.scale)
            self.found[call.layer, i] = found

    @property
    def median(self) -> float:
        """Over all heads."""
        return float(np.median(list(self.found.values())))


def _covariance(rows: Tensor) -> Tensor:
    return torch.cov(rows.detach().double().T, correction=0)


# ---- Needles: facts planted in a prompt, asked for where the prompt ends.

PLACES = ["Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Prague", "Havana", "Warsaw", "Athens"]
FACT = "The secret code of {place} is"
SIMILAR = "The old code of {place} was"  # what a distractor says
DIGITS = 5
FACTS = 4  # of the kind "several"


@dataclass(frozen=True)
class Planted:
    """``ids`` (1, T): a prompt of ``tokens`` tokens with facts in it, then each question with its
    answer; ``answers``: first place and token ids of each answer.
    """

    ids: Tensor
    tokens: int
    answers: list[tuple[int, list[int]]]

    def found(self, outcome: Outcome) -> float:
        """The share of answers whose every token is the likeliest, those before it given."""
        said = outcome.rows.argmax(-1).tolist()  # row i: the token behind place tokens + i
        found = [
            said[place - self.tokens - 1 :][: len(answer)] == answer
            for place, answer in self.answers
        ]
        return sum(found) / len(found)


def plant(source: Source, number: int, kind: str) -> Planted:
    """The needle of this number and kind: a single fact; several, all asked for; or a fact beside
    a similar one. Its prompt, depths, places and codes follow from the seed.
    """
    state = random.Random(source.spec.unit_seed({"needle": number}))
    count = FACTS if kind == "several" else 1
    asked = [(FACT, PLACES[(number + i) % len(PLACES)], _code(state)) for i in range(count)]
    told = list(asked)
    if kind == "distractor":
        told.append((SIMILAR, asked[0][1], _code(state)))
        state.shuffle(told)

    def tokens(text: str) -> list[int]:
        assert source.loaded.tokenizer is not None
        return list(source.loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    facts = [tokens(f" {words.format(place=place)} {code}.") for words, place, code in told]
    room = source.prefill - sum(map(len, facts))
    if room < source.prefill // 8:
        raise ValueError(
            f"needles: facts of {source.prefill - room} tokens do not fit a prompt of"
            f" {source.prefill}; use a longer --window"
        )
    text = source.ids(int(source.texts[number % len(source.texts)]))[0].tolist()
    depth = (number + 0.5) / max(1, source.spec.needles)
    depths = sorted((depth + i / len(facts)) % 1 for i in range(len(facts)))
    cuts = [0, *(1 + int(x * (room - 1)) for x in depths), room]
    ids = text[: cuts[1]]
    for i, fact in enumerate(facts):
        ids += [*fact, *text[cuts[i + 1] : cuts[i + 2]]]
    answers = []
    for i, (words, place, code) in enumerate(asked):
        question = ("\n\n" if i == 0 else ". ") + words.format(place=place)
        before, full = tokens(question), tokens(f"{question} {code}")
        if full[: len(before)] != before or len(full) == len(before):
            raise ValueError(
                "needles: the model's tokenizer joins a question and its answer in one token, so"
                " that the answer cannot be asked for; leave --needles out"
            )
        answers.append((len(ids) + len(before), full[len(before) :]))
        ids += full
    return Planted(torch.tensor([ids], device=source.loaded.device), source.prefill, answers)


def _code(state: random.Random) -> str:
    return "".join(str(state.randrange(10)) for _ in range(DIGITS))
