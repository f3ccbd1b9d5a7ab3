"""Fields that specs of models share, from what a flag or a YAML file holds: numbers, places, keep
rules.
"""

from __future__ import annotations

from typing import Any

__all__ = ["open_rules", "places", "split_numbers"]


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


def open_rules(value: Any) -> tuple[str, ...]:
    """Keep rules, each once and as it is written in short, its size left open: a ladder of sizes is
    for it.
    """
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ValueError(f"expected a list of keep rules, got {value!r}")
    from esscher.keep import parse  # help and flags do not wait for torch

    rules = [parse(text) for text in texts]
    for rule in rules:
        if rule.free is None:
            raise ValueError(
                "expected rules with one part that has no number, which keeps what is left; got"
                f" {rule}"
            )
    return tuple(dict.fromkeys(str(rule) for rule in rules))
