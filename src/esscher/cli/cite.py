"""``esscher cite``: the works behind what esscher computes."""

from __future__ import annotations

from typing import Annotated

import typer

from esscher.cli.output import Json, print_json
from esscher.theory import REFERENCES


def cite(
    key: Annotated[str | None, typer.Argument(help="B or S; all when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Print the BibTeX of the results esscher relies on.

    Example: esscher cite B
    """
    chosen = {name.strip("[]"): entry for name, entry in REFERENCES.items()}
    if key is not None:
        if key not in chosen:
            raise ValueError(f"key: expected one of {', '.join(chosen)}, got {key!r}")
        chosen = {key: chosen[key]}
    if as_json:
        print_json(chosen)
    else:
        print("\n\n".join(chosen.values()))
