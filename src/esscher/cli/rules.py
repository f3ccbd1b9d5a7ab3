"""``esscher rules``: the eviction rules that commands understand."""

from __future__ import annotations

import inspect
import re

from esscher.cli.options import Json
from esscher.cli.output import print_json, show


def rules(as_json: Json = False) -> None:
    """List the eviction rules that --rules takes: what each keeps, and where it runs.

    Numbers follow a colon, and rules join with +, e.g. sinks:4+recent:256. In esscher compress
    +refit at the end of a rule gives kept keys new values and weights, +values values alone.

    Example: esscher rules
    """
    from esscher.keep.rule import rules as known
    from esscher.keep.rule import usage

    rows = []
    for name, make in sorted(known().items()):
        parameters = inspect.signature(make).parameters.values()
        needed = [1 for one in parameters if one.default is one.empty]
        about = " ".join((make.__doc__ or "").split("\n\n")[0].split())
        about = re.split(r"[;:] |\. (?=[A-Z])", about.replace("``size`` ", "").replace("`", ""))[0]
        keeps = re.sub(r" \([^)]*$", "", about).rstrip(".")  # a parenthesis that was cut
        rows.append({"rule": name, "runs on": make(*needed).where, "keeps": keeps})
    if as_json:
        return print_json([row | {"written": usage(row["rule"])} for row in rows])
    show("", rows)
