"""What commands print: tables for people, JSON for machines; logs go to stderr.

A command's module says what it takes; what it computes with is imported when it is called, in its
function. So help and completion wait for nothing.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esscher.models.huggingface.packaged import PACKAGED
from esscher.report.formats import FORMATS
from esscher.runs.printable import plain, printable

if TYPE_CHECKING:
    import torch

__all__ = [
    "FIGURES",
    "MODEL",
    "Figures",
    "Json",
    "Out",
    "as_dtype",
    "as_path",
    "check_device",
    "figure_formats",
    "log",
    "number",
    "path_argument",
    "path_option",
    "print_json",
]

UNPRINTABLE = re.compile("[^\n -~]+")  # at most; letters of other scripts are told apart one by one

MODEL = (
    f"A folder, a GGUF file, a hub name, or {' or '.join(known.name for known in PACKAGED)} (models"
    f" that come as packages); {PACKAGED[0].name} when left out."
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]


def path_argument(help: str, shown: str = "RUN") -> Any:
    return typer.Argument(help=help, parser=as_path, metavar=shown)


def path_option(name: str, help: str) -> Any:
    return typer.Option(name, help=help, parser=as_path, metavar="PATH")


DTYPES = ("float32", "float64")


def as_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"--dtype: expected {' or '.join(DTYPES)}, got {name!r}")
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def as_path(text: str | Path) -> Path:
    """A path as a user names it; an empty name would be the working folder."""
    name = str(text)
    if not name.strip() or "\0" in name:
        raise typer.BadParameter(
            f"expected the name of a file or folder, got {name!r}; the working folder is ."
        )
    return Path(name)


Out = Annotated[Path | None, path_option("--out", "Run directory; runs/NAME-HASH when left out.")]
FIGURES = "svg,png"  # where none are named
Figures = Annotated[
    str,
    typer.Option(
        "--figures", help="Figure formats: svg, png, pdf, separated by commas; empty for none."
    ),
]


def check_device(name: str) -> str:
    """A device on which tensors can be made here."""
    import torch

    try:
        if torch.empty(1, device=name).device.type == "meta":
            raise ValueError(
                f"--device: expected a device that computes, such as cpu or cuda, got {name!r}"
            )
    except (RuntimeError, AssertionError) as cause:  # torch's words for a device that is not there
        raise ValueError(f"--device: {name!r} cannot be used here: {cause}") from cause
    return name


def figure_formats(text: str) -> list[str]:
    """Formats of figure files, separated by commas; refused before anything is computed for
    them.
    """
    formats = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = [kind for kind in formats if kind not in FORMATS]
    if unknown:
        raise ValueError(
            f"--figures: expected some of {', '.join(FORMATS)}, got {', '.join(unknown)}"
        )
    return formats


def log(message: str) -> None:
    """A line on stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def number(value: float | None, form: str = ".4g") -> str:
    """A number as people read it; "-" where there is none."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def print_json(value: Any) -> None:
    """JSON in which every character is printable or escaped; ASCII alone where the stream takes no
    more.
    """
    ascii_only = not (sys.stdout.encoding or "ascii").lower().startswith("utf")
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=ascii_only)
    print(UNPRINTABLE.sub(lambda found: "".join(_escaped(c) for c in found.group()), text))


def _escaped(character: str) -> str:
    return (
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]
    )
