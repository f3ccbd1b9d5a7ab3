"""What a budget is asked, as the flags of ``esscher budget``."""

from __future__ import annotations

from pydantic import Field

from esscher.runs.spec import Plain

__all__ = ["ALLOWED", "BudgetFlags"]

ALLOWED = 0.1  # relative error, where neither an error nor a total is given


class BudgetFlags(Plain):
    """A keep rule, and an error or a total."""

    rule: str | None = Field(default=None, description="keep rule, such as heavy or sinks:4+recent")
    epsilon: float | None = Field(
        default=None, description="relative root mean square error to allow"
    )
    total: int | None = Field(
        default=None, description="keys to split between all key-value heads, instead of an error"
    )
    weights: str | None = Field(
        default=None,
        description=(
            "what heads count in a split: none (all alike), or a run of esscher downstream"
            " --sensitivity"
        ),
    )
