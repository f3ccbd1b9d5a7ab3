"""Flags from the fields of a spec: kinds, defaults, what is left out, and what the command is
given.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from esscher.cli.app import _as_click
from esscher.cli.options import Fields, Given, with_fields
from esscher.runs.spec import RunSpec


class TeaSpec(RunSpec):
    """A spec of every kind of field."""

    job: Literal["tea"] = "tea"
    cups: int = Field(default=2, ge=1, le=9, description="cups to fill")
    heat: float | None = Field(default=None, description="degrees of the water")
    kind: Literal["green", "black"] = Field(default="green", description="which leaves")
    milk: bool = Field(default=False, description="milk comes first")
    times: tuple[int, ...] = Field(default=(10, 30_000, 1_000_000), description="seconds")
    guests: tuple[str, ...] = Field(default=("a", "b"), description="who comes")
    shares: tuple[float, ...] = Field(default=(0.5,), description="how much each")


HERE = f"{__name__}:TeaSpec"
ALL = ("cups", "heat", "kind", "milk", "times", "guests", "shares", "seed")


def called(fields: Fields | tuple[Fields, ...], line: str) -> Any:
    """What a command is given for a line of flags; what it prints where it refuses or helps."""
    given: list[Given] = []

    def tea(first: Given, sugar: Annotated[int, typer.Option("--sugar")] = 1) -> None:
        """Make tea."""
        given.append({**first, "sugar": sugar})

    groups = fields if isinstance(fields, tuple) else (fields,)
    tea.__annotations__["first"] = functools.reduce(
        lambda hint, group: Annotated[hint, group], groups, Given
    )
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_fields(tea))
    done = CliRunner().invoke(app, line.split(), env={"COLUMNS": "80"})
    return given[0] if given else done.output


def test_only_what_was_given_is_given() -> None:
    assert called(Fields(HERE, ALL), "") == {"sugar": 1}
    line = (
        "--cups 3 --heat 90 --kind black --milk --times 5:9 --guests x --guests y --shares .25"
        " --seed 0 --sugar 2"
    )
    assert called(Fields(HERE, ALL), line) == {
        **{
            "cups": 3,
            "heat": 90.0,
            "kind": "black",
            "milk": True,
            "times": "5:9",
            "guests": ["x", "y"],
        },
        **{"shares": [0.25], "seed": 0, "sugar": 2},
    }


def test_fields_of_several_specs_are_one_parameter() -> None:
    first, second = Fields(HERE, ("kind",), defaults=True), Fields(HERE, ("heat", "seed"))
    assert called((first, second), "--seed 3") == {"kind": "green", "seed": 3, "sugar": 1}


def test_commands_of_a_group_have_flags_too() -> None:
    given: list[Given] = []
    group = typer.Typer(rich_markup_mode=None)
    for name in ("cup", "pot"):

        def brew(settings: Given) -> None:
            given.append(settings)

        brew.__annotations__["settings"] = Annotated[Given, Fields(HERE, ("cups", "milk"))]
        group.command(name)(brew)
    for _ in range(2):  # looked up again, it is the same
        _as_click("tea", group)(args=["pot", "--cups", "4", "--milk"], standalone_mode=False)
    assert given == [{"cups": 4, "milk": True}] * 2


def test_zero_is_given() -> None:
    assert called(Fields(HERE, ("heat", "cups")), "--heat 0 --cups 0") == {
        "heat": 0.0,
        "cups": 0,
        "sugar": 1,
    }


def test_defaults_of_the_spec() -> None:
    names = ("cups", "heat", "kind", "times", "guests")
    fields = Fields(HERE, names, flags={"guests": "guest"}, as_text={"guests": " "}, defaults=True)
    assert called(fields, "--guest c") == {
        "cups": 2,
        "kind": "green",
        "times": "10,3e4,1e6",
        "guests": "c",
        "sugar": 1,
    }
    assert called(fields, "")["guests"] == "a b"


def test_help_has_the_words_of_the_field() -> None:
    said = " ".join(
        called(Fields(HERE, ALL, left_out={"heat": "as hot as it gets"}), "--help").split()
    )
    for words in (
        "Make tea.",
        "Cups to fill; 2.",
        "Degrees of the water; as hot as it gets.",
        "Which leaves; green.",
        "Who comes.",
    ):
        assert words in said


@pytest.mark.parametrize("line", ["--cups two", "--seed -1", "--job coffee"])
def test_what_a_flag_refuses(line: str) -> None:
    assert line.split()[0] in called(Fields(HERE, ALL), line)
