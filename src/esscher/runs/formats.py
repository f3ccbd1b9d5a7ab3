"""The formats of exported tables, by name; named without what writes them."""

from __future__ import annotations

__all__ = ["ENDINGS"]

ENDINGS = {"csv": ".csv", "json": ".json", "parquet": ".parquet", "netcdf": ".nc"}
