"""Flags from the fields of a spec: help, defaults, and what a command is given."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from esscher.cli.options import given, option
from esscher.runs.spec import RunSpec


class TeaSpec(RunSpec):
    job: Literal["tea"] = "tea"
    cups: int = Field(default=2, ge=1, le=9, description="cups to fill")
    heat: float | None = Field(default=None, description="degrees of the water")
    milk: bool = Field(default=False, description="milk comes first")
    guests: tuple[str, ...] = Field(default=("a", "b"), description="who comes")


FOUND: list[dict[str, Any]] = []


def called(line: str) -> Any:
    """What a command is given for a line of flags; what it prints where it refuses or helps."""

    def tea(
        cups: Annotated[int | None, option(TeaSpec, "cups")] = None,
        heat: Annotated[float | None, option(TeaSpec, "heat", default="as hot as it gets")] = None,
        milk: Annotated[bool, option(TeaSpec, "milk", "Extras")] = False,
        guests: Annotated[list[str] | None, option(TeaSpec, "guests", flag="--guest")] = None,
        seed: Annotated[int | None, option(TeaSpec, "seed")] = None,
        sugar: int | None = None,
    ) -> None:
        """Make tea."""
        FOUND[:] = [given(locals()), given(locals(), TeaSpec)]

    app = typer.Typer()
    app.command()(tea)
    FOUND.clear()
    done = CliRunner().invoke(app, line.split(), env={"COLUMNS": "100"})
    return list(FOUND) or done.output


def test_only_what_was_given_is_given() -> None:
    assert called("") == [{}, {}]
    fields = {"cups": 0, "heat": 90.0, "milk": True, "guests": ["x", "y"], "seed": 0}
    line = "--cups 0 --heat 90 --milk --guest x --guest y --seed 0 --sugar 2"
    assert called(line) == [{**fields, "sugar": 2}, fields]


def test_help_has_the_words_of_the_field() -> None:
    said = called("--help")
    for words in ("Make tea.", "to fill (default: 2).", "as hot as it gets).", "Extras", "--guest"):
        assert words in said


@pytest.mark.parametrize("line", ["--cups two", "--seed one", "--job coffee"])
def test_what_a_flag_refuses(line: str) -> None:
    assert line.split()[0] in called(line)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_the_spec_refuses_what_no_seed_can_be(seed: int) -> None:
    with pytest.raises(ValueError, match="seed: "):
        TeaSpec.read({"seed": seed})
