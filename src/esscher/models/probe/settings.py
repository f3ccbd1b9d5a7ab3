"""The settings of ``es.probe``, named and typed: what a checker and an editor know of them, under
the names of the flags.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from esscher.models.corpus import CorpusSpec
from esscher.models.probe.spec import KEYS, ProbeSpec

__all__ = ["Settings", "read_settings"]

# a flag, and the field that holds several of them
RENAMED = {"epsilon": "epsilons", "scale": "scales"}


class Settings(TypedDict, total=False):
    """Fields of :class:`ProbeSpec` and of its corpus, where they are described."""

    revision: str | None
    corpus: Mapping[str, Any]
    window: int | None
    pool: Literal["auto", "corpus", "sequence"]
    positions: Iterable[int] | None
    special: bool
    queries: int
    kept_queries: int
    observe: int
    decode: int
    layers: Iterable[int] | None
    heads: Iterable[int] | None
    n: str | Iterable[int] | None
    fit: str | tuple[int, int] | None
    epsilon: float | Iterable[float]
    moments: int
    moments_n: str | Iterable[int] | None
    moments_queries: int
    rules: str | Sequence[Any] | None
    temperature: tuple[float, float] | None
    planted: int | None
    scale: float | Iterable[float]
    statistics: Sequence[str]
    batch: int
    part: int
    dtype: Literal["float32", "float64", "bfloat16", "float16"]
    seed: int
    device: str
    threads: int
    dataset: str | None
    split: str
    field: str | None
    packaged: Literal["prose", "code", "legal"] | None
    encoding: str
    limit: int | None
    max_tokens: int | None
    documents: Literal["joined", "separate"]


def read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ProbeSpec from settings; ValueError with the nearest name for an unknown one.

    ``special`` is a field of the spec and of the corpus: here it says, as the flag does, that
    special tokens are part of the pool.
    """
    known = {*Settings.__annotations__, *RENAMED.values()}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known - {*RENAMED.values()}), 1)
            hint = (
                f"; did you mean {near[0]}?"
                if near
                else f"; there are: {', '.join(sorted(known - {*RENAMED.values()}))}"
            )
            raise ValueError(f"{name}: no such setting of a probe{hint}")
    found = {RENAMED.get(name, name): _listed(name, value) for name, value in settings.items()}
    of_text = CorpusSpec.model_fields.keys() - ProbeSpec.model_fields.keys()
    own = {name: found.pop(name) for name in list(found) if name in of_text}
    return {**found, "corpus": {"max_tokens": KEYS, **found.pop("corpus", {}), **own}}


def _listed(name: str, value: Any) -> Any:
    """A range, an array or a set as a list, which a spec holds; rules given as objects by their
    text.
    """
    if name == "rules" and not isinstance(value, str | None):
        return [str(rule) for rule in value]
    if name in RENAMED and not isinstance(value, str | Iterable):
        return [value]
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return value
    return [part.item() if hasattr(part, "item") else part for part in value]
