"""Where a checkpoint is and what is read of it: folders, GGUF files, the hub, packaged models;
nothing that runs code.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esscher.hf.gguf import gguf_config, read_header
from esscher.hf.package import (
    PACKAGED,
    Packaged,
    packaged_model,
    pickle_advice,
    quiet,
    reading,
    transformers,
    why,
)

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")


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
        where = weights if _is_gguf(weights) else weights.parent
        return Source(str(where), known.distribution, known)
    text = str(name)
    # unlike Path's own, it leaves the name of an unknown user as it is
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        return Source(str(path), path.resolve().name)
    if _is_gguf(path):
        return Source(str(path), path.stem if path.suffix.lower() == ".gguf" else path.name)
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


def _is_gguf(path: Path) -> bool:
    """By its name, or by its first bytes."""
    if not path.is_file() or path.suffix.lower() == ".gguf":
        return path.is_file()
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def written(name: Any) -> str:
    """A model as a spec names it: a folder or file by its absolute path, so that a run can be
    resumed from anywhere.
    """
    if name is None:
        return "packaged"
    path = Path(os.path.expanduser(str(name)))
    is_name = packaged_model(name) is not None or not path.exists()
    return str(name) if is_name else str(path.absolute())


def read_config(source: Source, revision: str | None = None) -> Any:
    """The configuration of a model, without its weights; a model that cannot be loaded as it is
    meant is refused here.
    """
    if revision is not None and Path(source.where).exists():
        raise ValueError(
            f"revision: {source.shown} is on this machine and has no revisions, got {revision!r};"
            " leave it out"
        )
    if source.file is not None:
        return gguf_config(source.file)
    if source.folder is not None:
        check_folder(source.folder, "config.json")
    with reading(source.where, revision) as options:
        config = transformers().AutoConfig.from_pretrained(**options)
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        given = settings if isinstance(settings, dict) else vars(settings)
        raise ValueError(
            f"{source.where}: its weights are quantised"
            f" ({str(given.get('quant_method', 'unknown'))[:40]}), which is not read from"
            " safetensors; take the model before it was quantised, or a GGUF file of it"
        )
    return config


def check_folder(folder: Path, wanted: str) -> None:
    """Refuse a folder without the configuration or without safetensors."""
    if (folder / wanted).is_file() or (wanted != "config.json" and any(folder.glob("*.safetens*"))):
        return
    for path in sorted(folder.iterdir()):
        if path.suffix == ".gguf":
            raise ValueError(f"{folder}: no {wanted} in this folder; give the file: {path}")
        if path.suffix in PICKLES and wanted != "config.json":
            found = f"the folder holds {path.name} and no safetensors"
            raise ValueError(f"{folder}: {pickle_advice(found)}")
    raise ValueError(
        f"{folder}: no {wanted} in this folder; expected a Hugging Face model with"
        " model.safetensors"
    )


def weight_files(source: Source, revision: str | None) -> list[Path]:
    """The files of the weights."""
    if source.file is not None:
        return [source.file]
    if source.folder is not None:
        return sorted(source.folder.glob("*.safetensors"))
    hub = importlib.import_module("huggingface_hub")
    names = ["model.safetensors", "model-*.safetensors"]
    try:
        with quiet():
            found = hub.snapshot_download(source.where, revision=revision, allow_patterns=names)
    except Exception as cause:
        raise ValueError(f"{source.where}: {why(cause)}") from cause
    files = sorted(path for name in names for path in Path(found).glob(name))
    if not files:
        raise ValueError(f"{source.where}: " + pickle_advice("the checkpoint has no safetensors"))
    return files


def sha256_of(files: list[Path]) -> str:
    """sha256 of the weights file; of several, the sha256 of their names and hashes."""
    hashes = {}
    for path in files:
        with path.open("rb") as stream:
            hashes[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = "\n".join(f"{key} {value}" for key, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def stored_as(files: list[Path], dtype: str | None = None) -> str:
    """How the weights are stored and what they are read as: "GGUF Q4_1 and F32, read as float32".

    Types that hold most numbers come first.
    """
    counts: Counter[str] = Counter()
    is_file = len(files) == 1 and _is_gguf(files[0])
    for tensor in read_header(files[0]).tensors if is_file else ():
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    for file in () if is_file else files:
        with importlib.import_module("safetensors").safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118, it is no mapping
                piece = stream.get_slice(name)
                counts[piece.get_dtype()] += math.prod(piece.get_shape())
    kinds = " and ".join(kind for kind, _ in counts.most_common() if kind[0] not in "IU")
    said = f"{'GGUF' if is_file else 'safetensors'} {kinds}"
    plain = dtype is None or (kinds, dtype) == ("F32", "float32")
    return said if plain else f"{said}, read as {dtype}"
