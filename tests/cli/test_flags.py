"""Flags of every command as users type them: names, kinds, bounds and defaults, one a line in
flags.txt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esscher.cli.app import COMMANDS, load_command

KNOWN = Path(__file__).with_name("flags.txt")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it."""
    for name in COMMANDS:
        command = load_command(name)
        parts = getattr(command, "commands", None)
        yield from (
            ((f"{name} {part}", parts[part]) for part in parts) if parts else ((name, command),)
        )


def described(parameter: Any) -> str:
    """One line: names, kind with its bounds, default, where it may be repeated."""
    kind = parameter.type_descriptor.annotation
    bounds = "" if parameter.min is None else f" from {parameter.min} to {parameter.max}"
    default = "required" if parameter.required else repr(parameter.default)
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    return (
        f"{names} {getattr(kind, '__name__', kind)}{bounds}"
        f" {default}{' repeated' if parameter.multiple else ''}"
    )


def lines() -> list[str]:
    return [
        f"{words}: {described(parameter)}"
        for words, command in commands()
        for parameter in command.params
    ]


def test_flags_are_those_that_users_know() -> None:
    assert sorted(lines()) == sorted(KNOWN.read_text("utf-8").splitlines())


def test_help_of_a_flag_is_a_sentence() -> None:
    helps = {
        f"{words} {parameter.name}": parameter.help
        for words, command in commands()
        for parameter in command.params
    }
    assert {
        name: text for name, text in helps.items() if not re.fullmatch(r"[A-Z].*[^.]\.", text or "")
    } == {}
