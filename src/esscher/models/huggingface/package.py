"""transformers and gguf, imported when they are first needed and kept quiet; what they say, in one
line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["gguf", "pickle_advice", "quiet", "transformers", "why"]

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # with one of these the hub is not asked


def transformers() -> Any:
    """The transformers package; without it a ValueError that says how to install it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as cause:
        raise ValueError(
            f"Hugging Face models need transformers ({cause}): pip install 'esscher[hf]'"
        ) from cause


def gguf() -> Any:
    """The package gguf, with accelerate beside it: transformers needs both for GGUF files; a
    ValueError without them.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"GGUF files need {' and '.join(missing)}, not installed here: pip install gguf"
            " accelerate"
        )
    return importlib.import_module("gguf")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings of transformers and the hub inside; as before
    afterwards.
    """
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


def why(cause: Exception) -> str:
    """One line for a user out of what the library said."""
    text = " ".join(str(cause).split())
    low = text.lower()
    if "trust_remote_code" in low or "execute the" in low:
        return (
            "the checkpoint brings code of its own, which is never run; choose a model that"
            " transformers knows"
        )
    if "safetensors" in low and (
        "no file named" in low or "not appear to have" in low or "not found" in low
    ):
        return pickle_advice("the checkpoint has no safetensors")
    if (
        "not a local folder" in low
        or "couldn't connect" in low
        or "offline" in low
        or "cannot find the requested" in low
    ):
        told = [
            name
            for name in OFFLINE
            if os.environ.get(name, "").lower() in ("1", "on", "yes", "true")
        ]
        if told:
            return (
                f"no such folder here, and not in the hub's cache; {told[0]} is set, so the hub was"
                " not asked: unset it"
            )
        return (
            "no such folder here, and not on the Hugging Face hub, not in its cache, or the hub"
            " cannot be reached"
        )
    if "model type" in low and "does not recognize" in low:
        kind = text.split("`")[1] if "`" in text else "unknown"
        return f"transformers {transformers().__version__} does not know the model type {kind}"
    return f"cannot be read: {type(cause).__name__}: {text[:240]}"


def pickle_advice(what: str) -> str:
    return (
        f"{what}, and files that can run code on loading (pickle) are refused; convert it where you"
        " trust it: AutoModel.from_pretrained(...).save_pretrained(folder)"
    )
