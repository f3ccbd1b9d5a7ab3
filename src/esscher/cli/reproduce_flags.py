"""How claims are tested, as flags say it."""

from __future__ import annotations

from pydantic import Field

from esscher.runs.spec import Plain

__all__ = ["ReproduceFlags"]


class ReproduceFlags(Plain):
    """Which claims, and how thoroughly."""

    everything: bool = Field(default=False, description="test every claim")
    quick: bool = Field(default=False, description="in minutes, as without a flag")
    full: bool = Field(default=False, description="at the size of the page on what holds, in hours")
    check: bool = Field(
        default=False, description="try the rules on made-up data, true and false, and stop"
    )
