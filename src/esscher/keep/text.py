"""Rules as text: parts joined by +, each a name and its numbers,
``sinks:4+recent:256+random:0.1:reweight``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

from esscher.keep.rule import Rule, refused, rules


def parse(text: str | Rule) -> Rule:
    """The rule that a text writes; a rule is given back as it is."""
    if isinstance(text, Rule):
        return text
    if not isinstance(text, str) or not text.strip():
        raise refused(f"keep: expected a rule such as sinks:4+recent:256, got {text!r}")
    rule: Rule | None = None
    for piece in text.split("+"):
        part = _part(piece.strip(), text)
        rule = part if rule is None else rule | part
    assert rule is not None
    return rule


def _part(piece: str, text: str) -> Rule:
    name, *words = piece.split(":")
    make = rules().get(name)
    if make is None:
        raise refused(f"keep: no rule {name!r} in {text!r}")
    numbers: list[object] = []
    named: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        is_flag = not equals and re.fullmatch(r"[a-z_]+", word)
        if not equals and not is_flag:
            numbers.append(_value(word, text))
        elif key.strip() in named:
            raise refused(f"keep: {key.strip()} is given twice in {piece!r}")
        else:
            named[key.strip()] = True if is_flag else _value(value, text)
    parameters = inspect.signature(make).parameters
    try:
        given = inspect.signature(make).bind(*numbers, **named).arguments
    except TypeError as cause:
        raise refused(
            f"keep: {piece!r} is not how {name} is written: {_usage(name, parameters)} ({cause})"
        ) from None
    for field, value in given.items():
        if isinstance(parameters[field].default, bool) != isinstance(value, bool):
            raise refused(
                f"keep: {piece!r} is not how {name} is written: {_usage(name, parameters)}"
            )
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
        raise refused(f"keep: expected a number, got {word!r} in {text!r}") from None


def _usage(name: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    return ":".join(
        [
            name,
            *(
                key if isinstance(field.default, bool) else key.upper()
                for key, field in parameters.items()
            ),
        ]
    )
