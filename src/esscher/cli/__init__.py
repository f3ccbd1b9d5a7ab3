"""The command line: one file per command. Flags come from the fields of specs (``options.py``)."""

from esscher.cli.app import main

__all__ = ["main"]
