"""What keep rules cost the heads of a probe, as its page shows it: the curves of every head, and
the totals of every rule.
"""

from __future__ import annotations

from typing import Any

from esscher.report.packing import Grids, numbers, parts_of, records_of, shortened
from esscher.report.reading import read_table
from esscher.runs import Run

__all__ = ["frontier_content"]

FLOOR = "neyman"  # the rule that no other goes below, to first order: drawn dashed
LONGEST = 80  # characters of a rule's name
DIGITS = 3  # of an error on a curve; a head has a dozen of them for each of ten rules


def frontier_content(run: Run, places: list[tuple[int, int]], grids: Grids) -> dict[str, Any]:
    """Rules by name, each head's curves in their order (keys kept, errors), and totals; nothing
    where none was measured.
    """
    frame = read_table(run, "frontier")
    if frame is None or frame.empty:
        return {}
    totals = records_of(read_table(run, "rule_budget"))
    names = {str(rule): shortened(str(rule), LONGEST) for rule in dict.fromkeys(frame["rule"])}
    rules = list(names)
    curves: dict[tuple[int, int], list[Any]] = {}
    for (layer, head, rule), part in parts_of(frame, ["layer", "head", "rule"]):
        own = curves.setdefault((int(layer), int(head)), [None] * len(rules))
        own[rules.index(str(rule))] = [
            grids.place(numbers(part["kept"])),
            numbers(part["relative"], DIGITS),
        ]
    return {
        "rules": list(names.values()),
        "labels": {key: column.label for key, column in run.columns("frontier").items()},
        "floor": FLOOR,
        "frontier": [curves.get(place) for place in places],
        "totals": [{**row, "rule": names.get(row["rule"], "")} for row in totals],
    }
