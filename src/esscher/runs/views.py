"""How a run shows itself. What draws is found by name when it is asked for, as jobs are: nothing
that draws is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["VIEWS", "find_view"]

VIEWS: dict[str, str] = {
    "plot_curve": "esscher.report.run_figures:plot_curve",
    "plot_map": "esscher.report.run_figures:plot_map",
    "plot_rates": "esscher.report.run_figures:plot_rates",
    "plot_error": "esscher.report.figures:plot_alone",
    "html": "esscher.report.summary:html_summary",
    "text": "esscher.report.summary:text_summary",
    "budget": "esscher.models.probe.run_budget:run_budget",
}
"""Name of a view -> "module:function" of a function of a run, or of what else shows itself."""


def find_view(name: str) -> Callable[..., Any]:
    module, _, attribute = VIEWS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
