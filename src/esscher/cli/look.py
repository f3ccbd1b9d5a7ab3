"""How a table is shown, as flags say it."""

from __future__ import annotations

from pydantic import Field

from esscher.runs.spec import Plain

__all__ = ["TableLook"]


class TableLook(Plain):
    """Arguments of :func:`esscher.cli.tables.show_table`."""

    top: int | None = Field(default=None, ge=1, lt=10**9, description="rows of the table, at most")
    sort: str | None = Field(
        default=None, description="column to order the rows by; NAME:down for the largest first"
    )
    markdown: bool = Field(default=False, description="tables as Markdown")
