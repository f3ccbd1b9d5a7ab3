"""The version of what is stored, which every file of a run names, and the names tables may have."""

from __future__ import annotations

import re
from typing import Any

from esscher.runs.errors import RunError

__all__ = ["NAME", "SCHEMA", "check_schema"]

SCHEMA = 1  # raised when the meaning of files changes
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # of a table


def check_schema(schema: Any, origin: str) -> None:
    """Refuse what another version of the format wrote; schema 1 is the first, so there is none
    older to read.
    """
    if schema == SCHEMA:
        return
    if isinstance(schema, int) and schema > SCHEMA:
        raise RunError(
            f"{origin}: written in schema {schema} by a newer esscher; this one reads up to"
            f" {SCHEMA}. Upgrade esscher"
        )
    raise RunError(
        f"{origin}: written in schema {schema}, which this esscher no longer reads (it reads"
        f" {SCHEMA})"
    )
