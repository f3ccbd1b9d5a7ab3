"""Rules as text: parts joined by +, each a name and its numbers, ``sinks:4+recent:256+random:0.1:reweight``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

from esscher.keep.rule import Rule

__all__ = ["parse", "register", "rules"]

_RULES: dict[str, Callable[..., Rule]] = {}


def register(name: str, make: Callable[..., Rule]) -> None:
    """Let ``make`` be called by this name in texts."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"keep: expected a name of small letters, digits and _, got {name!r}")
    _RULES[name] = make


def rules() -> dict[str, Callable[..., Rule]]:
    """What may be written, by name."""
    return dict(_RULES)


def parse(text: str | Rule) -> Rule:
    """The rule that a text writes; a rule is given back as it is."""
    if isinstance(text, Rule):
        return text
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"keep: expected a rule such as sinks:4+recent:256, got {text!r}; rules: {_known()}")
    rule: Rule | None = None
    for piece in text.split("+"):
        part = _part(piece.strip(), text)
        rule = part if rule is None else rule | part
    assert rule is not None
    return rule


def _part(piece: str, text: str) -> Rule:
    name, *words = piece.split(":")
    if name not in _RULES:
        raise ValueError(f"keep: no rule {name!r} in {text!r}; rules: {_known()}")
    make = _RULES[name]
    numbers: list[object] = []
    named: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            named[key.strip()] = _value(value, text)
        elif re.fullmatch(r"[a-z_]+", word):
            named[word] = True
        else:
            numbers.append(_value(word, text))
    try:
        inspect.signature(make).bind(*numbers, **named)
    except TypeError as cause:
        raise ValueError(f"keep: {piece!r} is not how {name} is written: {_usage(name)} ({cause})") from None
    return make(*numbers, **named)


def _value(word: str, text: str) -> object:
    word = word.strip()
    if re.fullmatch(r"\d+", word):
        return int(word)
    if re.fullmatch(r"\d+(,\d+)+", word):
        return tuple(int(x) for x in word.split(","))
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"keep: expected a number, got {word!r} in {text!r}") from None


def _usage(name: str) -> str:
    words = [name]
    for field in inspect.signature(_RULES[name]).parameters.values():
        is_flag = field.default is False or field.default is True
        words.append(field.name if is_flag else field.name.upper())
    return ":".join(words)


def _known() -> str:
    return ", ".join(sorted(_RULES))
