"""``python -m esscher`` is the command ``esscher``."""

from esscher.cli import main

main()
