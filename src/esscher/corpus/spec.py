"""A corpus as plain data: which text, how much of it, how it is cut."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from esscher.runs.spec import Plain


class CorpusSpec(Plain):
    """A corpus: one source (files, a dataset or packaged text), how much of it, how it is cut."""

    text: tuple[str, ...] = Field(default=(), description="file or folder of text; may be repeated")
    dataset: str | None = Field(
        default=None, description="Hugging Face dataset, name or name:config, streamed"
    )
    split: str = Field(default="train", description="split of the dataset")
    field: str | None = Field(
        default=None, description="field with the text in JSONL, CSV, Parquet, datasets"
    )
    packaged: Literal["prose", "code", "legal", "bible"] | None = Field(
        default=None, description="text that needs no file: prose, code, legal or bible"
    )
    limit: PositiveInt | None = Field(default=None, description="documents at most")
    max_tokens: PositiveInt | None = Field(default=None, description="tokens of text at most")
    documents: Literal["joined", "separate"] = Field(
        default="joined", description="may a window cross documents"
    )
    special: bool = Field(
        default=True, description="windows carry the model's special tokens around the text"
    )

    @model_validator(mode="before")
    @classmethod
    def _prose_if_nothing(cls, fields: Any) -> Any:
        sources = ("text", "dataset", "packaged")
        if isinstance(fields, dict) and not any(fields.get(name) for name in sources):
            return {**fields, "packaged": "prose"}
        return fields

    @model_validator(mode="after")
    def _one_source(self) -> CorpusSpec:
        given = [name for name in ("text", "dataset", "packaged") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(
                f"expected one source of text, got {' and '.join(given)}; leave all but one out"
            )
        if self.packaged and self.field is not None:
            raise ValueError(
                f"field '{self.field}' was asked for, but packaged text has no fields; leave it out"
            )
        return self


# ---- Fields that specs of models share


def split_numbers(value: Any, such_as: str) -> Any:
    """Numbers with commas, where they come as text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError as cause:
        raise ValueError(f"expected numbers such as {such_as}, got {value!r}") from cause


def places(value: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Numbers of layers, heads or positions, each once and rising."""
    if value is None:
        return None
    if not value or min(value) < 0:
        raise ValueError(f"expected whole numbers from 0 on, got {list(value)}")
    return tuple(sorted(set(value)))


def open_rules(value: Any, *, fixed: bool = False) -> tuple[str, ...]:
    """Keep rules by their short names, each once; their size is left open for a ladder of sizes,
    unless ``fixed`` allows one that is given.
    """
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ValueError(f"expected a list of keep rules, got {value!r}")
    from esscher.keep import parse, rules  # help and flags do not wait for torch

    found: dict[str, str] = {}
    for text in texts:
        rule, name = parse(text), str(text).strip()
        if rule.free is None and not fixed:
            raise ValueError(
                "expected rules with one part that has no number, which keeps what is left; got"
                f" {rule}"
            )
        found.setdefault(str(rule), name if name in rules() else str(rule))
    return tuple(found.values())
