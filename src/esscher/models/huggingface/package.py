"""transformers, imported when it is first needed and kept quiet."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["quiet", "transformers"]


def transformers() -> Any:
    """The transformers package; without it a ValueError that says how to install it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as cause:
        raise ValueError(f"Hugging Face models need transformers ({cause}): pip install 'esscher[hf]'") from cause


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings of transformers and the hub inside; as before afterwards."""
    settings = transformers().utils.logging
    had_bars, had_level = settings.is_progress_bar_enabled(), settings.get_verbosity()
    hub = logging.getLogger("huggingface_hub")
    had_hub_level = hub.level
    settings.disable_progress_bar()
    settings.set_verbosity(logging.CRITICAL)
    hub.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.setLevel(had_hub_level)
        settings.set_verbosity(had_level)
        if had_bars:
            settings.enable_progress_bar()
