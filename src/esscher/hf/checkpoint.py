"""Where a checkpoint is and what is read of it: folders, GGUF files, the hub, packaged models;
nothing that runs code.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esscher.hf.gguf import gguf_config, read_header
from esscher.hf.package import (
    PACKAGED,
    Packaged,
    packaged_model,
    pickle_advice,
    quiet,
    transformers,
    why,
)
from esscher.runs.files import kind_of

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
MAGIC = b"GGUF"
# safetensors' names, and torch's
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


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


def resolve(name: Any) -> Source:
    """Where a packaged name, a folder, a GGUF file or a name on the hub leads; None is the first
    packaged model.

    A packaged name goes before a folder of that name, so that a run means the same wherever it is
    resumed: the folder is ./minilm, or ``pathlib.Path("minilm")``.
    """
    known = packaged_model(name)
    if known is not None:
        weights = known.path()
        return Source(
            str(weights if _is_gguf(weights) else weights.parent), known.distribution, known
        )
    text = str(name)
    # unlike Path's own, it leaves the name of an unknown user as it is
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        return Source(str(path), path.resolve().name)
    if path.exists():
        if not _is_gguf(path):
            kind = kind_of(path.stat().st_mode)
            raise ValueError(
                f"{text}: expected a model folder, a GGUF file or a hub name, got {kind}"
            )
        return Source(str(path), path.stem if path.suffix.lower() == ".gguf" else path.name)
    if (
        text.startswith(("/", "./", "../", "~"))
        or text.count("/") > 1
        or not text.strip()
        or text.lower().endswith(".gguf")
    ):
        raise ValueError(
            f"{text}: no such model folder or GGUF file; give a folder with config.json and"
            " model.safetensors, a GGUF file, a hub name, or one of"
            f" {', '.join(known.name for known in PACKAGED)}"
        )
    return Source(text, text)


def _is_gguf(path: Path) -> bool:
    """By its name, or by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def written(name: Any) -> str:
    """A model as a spec names it: a folder or file by its absolute path, since whoever resumes the
    run may stand elsewhere.
    """
    if name is None:
        return "packaged"
    path = Path(os.path.expanduser(str(name)))
    return (
        str(name) if packaged_model(name) is not None or not path.exists() else str(path.absolute())
    )


def as_read(name: Any) -> str:
    """A model as a user is told of it while it is read: a GGUF file takes its time."""
    source = resolve(name)
    if source.file is None:
        return f"the model {source.shown}"
    return (
        f"{source.shown} ({source.file.stat().st_size / 1e6:.0f} MB of GGUF, to be dequantised;"
        " half a minute for 100 MB)"
    )


def files_of_model(name: Any, revision: str | None = None) -> list[Path]:
    """The files that a name stands for now; of a model on the hub the configuration in its cache,
    which names the commit.
    """
    source = resolve(name)
    if source.file is not None:
        return [source.file]
    if Path(source.where).is_dir():
        return sorted(path for path in Path(source.where).iterdir() if path.is_file())
    try:
        hub = importlib.import_module("huggingface_hub")
        cached = hub.try_to_load_from_cache(source.where, "config.json", revision=revision)
    # no such package, or no name for the hub: who loads the model says it
    except (ImportError, ValueError):
        return []
    return [Path(cached)] if isinstance(cached, str) else []


def read_config(source: Source, revision: str | None = None) -> Any:
    """The configuration of a model, without its weights; what cannot be loaded as it is meant is
    refused here.
    """
    package = transformers()
    if revision is not None and Path(source.where).exists():
        raise ValueError(
            f"revision: {source.shown} is on this machine and has no revisions, got {revision!r};"
            " leave it out"
        )
    if source.file is not None:
        return gguf_config(source.file)
    if Path(source.where).is_dir():
        _check_files(Path(source.where))
    try:
        with quiet():
            config = package.AutoConfig.from_pretrained(
                source.where, revision=revision, trust_remote_code=False
            )
    except Exception as cause:  # whatever the hub, the file or its content made the library raise
        raise ValueError(f"{source.where}: {why(cause)}") from cause
    _check_quantisation(source.where, config)
    return config


def _check_quantisation(where: str, config: Any) -> None:
    """Weights that only a library of their own can unpack are refused before they are read."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    given = settings if isinstance(settings, dict) else vars(settings)
    method = str(given.get("quant_method", "unknown"))[:40]
    raise ValueError(
        f"{where}: its weights are quantised ({method}), which is not read from safetensors; take"
        " the model before it was quantised, or a GGUF file of it"
    )


def _check_files(folder: Path) -> None:
    """A folder with a configuration, and without pipes or devices, on which a reader waits for
    ever.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json in this folder; {_file_instead(folder)}")
    for entry in sorted(folder.iterdir()):
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise ValueError(
                f"{entry}: expected a file, got {kind_of(entry.stat().st_mode)}; remove it from the"
                " model"
            )


def check_folder(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder}: " + pickle_advice(f"the folder holds {pickles[0]} and no safetensors")
        )
    raise ValueError(f"{folder}: no model.safetensors in this folder; {_file_instead(folder)}")


def _file_instead(folder: Path) -> str:
    """What to give in place of a folder without safetensors."""
    files = sorted(folder.glob("*.gguf"))
    return (
        f"give the file: {files[0]}"
        if files
        else "expected a Hugging Face model with model.safetensors"
    )


def weight_files(source: Source, revision: str | None) -> list[Path]:
    """The files of the weights."""
    if source.file is not None:
        return [source.file]
    folder = Path(source.where)
    return (
        sorted(folder.glob("*.safetensors"))
        if folder.is_dir()
        else _hub_files(source.where, revision)
    )


def sha256_of(files: list[Path]) -> str:
    """sha256 of the weights file; of several, the sha256 of their names and hashes."""
    hashes = {}
    for path in files:
        with path.open("rb") as stream:
            hashes[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return hashlib.sha256(
        "\n".join(f"{key} {value}" for key, value in sorted(hashes.items())).encode()
    ).hexdigest()


def stored_as(files: list[Path], dtype: str | None = None) -> str:
    """What the weights are in their files, and what they are read as: "GGUF Q4_1, dequantised to
    float32".

    Types that hold most numbers come first; plain numbers beside quantised ones (norms) are not
    named.
    """
    if len(files) == 1 and _is_gguf(files[0]):
        kinds = read_header(files[0]).kinds()
        packed = [kind for kind in kinds if kind not in FLOATS]
        read = (
            ""
            if dtype is None
            else (
                f", dequantised to {dtype}"
                if packed
                else _read_as([FLOATS[k] for k in kinds], dtype)
            )
        )
        return f"GGUF {' and '.join(packed or kinds)}{read}"
    counts: Counter[str] = Counter()
    for file in files:
        with importlib.import_module("safetensors").safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118, it is no mapping
                piece = stream.get_slice(name)
                counts[piece.get_dtype()] += int(torch.Size(piece.get_shape()).numel())
    kinds = [
        FLOATS.get(kind, kind)
        for kind, _ in counts.most_common()
        if not kind.startswith(("I", "U", "BOOL"))
    ]
    return f"safetensors {' and '.join(kinds)}{_read_as(kinds, dtype)}"


def _read_as(kinds: list[str], dtype: str | None) -> str:
    return "" if dtype is None or kinds == [dtype] else f", read as {dtype}"


def _hub_files(source: str, revision: str | None) -> list[Path]:
    hub = importlib.import_module("transformers.utils.hub")
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    try:
        with quiet():
            single = hub.cached_file(source, "model.safetensors", **options)
            if single is not None:
                return [Path(single)]
            index = hub.cached_file(source, "model.safetensors.index.json", **options)
            shards = (
                []
                if index is None
                else hub.get_checkpoint_shard_files(source, index, revision=revision)[0]
            )
    except Exception as cause:
        raise ValueError(f"{source}: {why(cause)}") from cause
    if not shards:
        raise ValueError(f"{source}: " + pickle_advice("the checkpoint has no safetensors"))
    return [Path(shard) for shard in shards]
