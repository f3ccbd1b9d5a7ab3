"""The command line: one file per command."""

from esscher.cli.app import main

__all__ = ["main"]
