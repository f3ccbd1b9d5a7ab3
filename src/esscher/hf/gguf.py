"""GGUF files as transformers models: transformers' reader, and a proof that what it made is the
model of the file.

The reader silently leaves out settings it does not know (scaled positions, sliding windows) and
tensors that have no place. So every setting of the architecture must be found again in the
configuration and every number of the file in the model, and only architectures are read whose
attention the tests compare with the same model in safetensors.
"""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from esscher.hf.checkpoint import gguf, quiet, reading, transformers

CUT = "the file is cut off or damaged"


class GgufHeader(NamedTuple):
    """Settings and tensors of a file; of the tokenizer's lists only their lengths."""

    architecture: str
    settings: dict[str, Any]
    tensors: list[Any]


def read_header(path: Path) -> GgufHeader:
    """The header of a whole file; a damaged one is a ValueError of one line."""
    return _read_header(path, _version(path))


def _version(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=1)  # a second for a large vocabulary
def _read_header(path: Path, version: tuple[int, ...]) -> GgufHeader:
    library = gguf()
    is_list = library.GGUFValueType.ARRAY

    class Reader(library.GGUFReader):  # type: ignore[misc, name-defined]
        def _get(self, offset: int, dtype: Any, count: Any = 1, **_: Any) -> Any:
            # never beyond the end, where the package would follow a wrong count; and faster
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    try:
        reader = Reader(path)
        settings = {
            name: len(field.data)
            if name.startswith("tokenizer.") and field.types[0] == is_list
            else field.contents()
            for name, field in reader.fields.items()
        }
    except Exception as cause:  # whatever the bytes made the package raise
        raise ValueError(f"{path}: {' '.join(str(cause).split())[:200]}; {CUT}") from cause
    architecture = settings.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(
            f"{path}: no general.architecture among its settings, so there is no knowing what model"
            " it is"
        )
    if isinstance(parts := settings.get("split.count"), int) and parts > 1:
        raise ValueError(
            f"{path}: one of {parts} parts of a model; join them first: llama-gguf-split --merge"
        )
    return GgufHeader(architecture, settings, reader.tensors)


# ---- The model of a file

ARCHITECTURES = ("gemma2", "gemma3", "gpt2", "llama", "qwen2", "qwen3")
# llama.cpp's defaults for settings that a file leaves out
UNSAID: dict[str, Any] = {
    "rope.freq_base": 10000.0,
    "attention.sliding_window": None,
    "attn_logit_softcapping": None,
}
# Settings that change nothing up to the last layer, or that the sizes of tensors prove
OTHER = ("final_logit_softcapping", "tensor_data_layout")
# tokenizers that begin a text with BOS
BEGINS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
HEAD = ("output.weight", "output.bias")  # behind the last layer, which attention does not see
FACTORS = "rope_freqs.weight"  # of llama: divisors of the rotary frequencies


def gguf_config(path: Path) -> Any:
    """The configuration of the model in a file, compared with what the file says."""
    return copy.deepcopy(_gguf_config(path, _version(path)))


@functools.lru_cache(maxsize=1)  # as long as the header
def _gguf_config(path: Path, version: tuple[int, ...]) -> Any:
    header = read_header(path)
    kind = header.architecture
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{path}: the architecture {kind[:40]!r} is not read from GGUF; these are:"
            f" {', '.join(ARCHITECTURES)}"
        )
    blocks = header.settings.get(f"{kind}.block_count")
    if not isinstance(blocks, int) or not 1 <= blocks <= len(header.tensors):
        raise ValueError(
            f"{path}: expected a number of layers that {len(header.tensors)} tensors can make, got"
            f" {blocks!r}"
        )
    with reading(path) as options:
        config = transformers().AutoConfig.from_pretrained(**options)
    for name, (given, made) in _compared(header, config).items():
        if not _same(given, made):
            raise ValueError(
                f"{path}: the file says {name} = {given!r}, transformers"
                f" {transformers().__version__} makes {made!r} of it; attention would not be the"
                " file's: take the model's safetensors"
            )
    if (
        isinstance(words := header.settings.get("tokenizer.ggml.tokens"), int)
        and words > config.vocab_size
    ):
        raise ValueError(
            f"{path}: its tokenizer has {words} words, its embedding {config.vocab_size}; {CUT}"
        )
    _check_tensors(path, header, skeleton(config, str(path)))
    return config


def skeleton(config: Any, name: str, auto: str = "AutoModel") -> Any:
    """The model of a configuration, by a class of transformers, without memory for its weights."""
    try:
        with quiet(), torch.device("meta"):
            made = getattr(transformers(), auto).from_config(config, trust_remote_code=False)
            return made.eval()
    except Exception as cause:  # a configuration may be wrong in any way
        line = " ".join(str(cause).split())
        raise ValueError(
            f"{name}: no model can be built from this configuration: {line[:240]}"
        ) from cause


def _compared(header: GgufHeader, config: Any) -> dict[str, tuple[Any, Any]]:
    """By name, what the file says of its architecture and what the configuration says."""
    prefix, made = f"{header.architecture}.", _in_gguf_words(config)
    own = [(key, value) for key, value in header.settings.items() if key.startswith(prefix)]
    said = {key.removeprefix(prefix): value for key, value in own}
    if said.get("rope.scaling.type", "none") == "none":  # its numbers have no effect then
        said = {key: value for key, value in said.items() if not key.startswith("rope.scaling.")}
    if "attention.scale" in made and isinstance(width := said.get("attention.key_length"), int):
        said.setdefault("attention.scale", width**-0.5)
    reach = said.get("attention.sliding_window")
    if isinstance(reach, int) and (reach == 0 or reach >= said.get("context_length", math.inf)):
        del said["attention.sliding_window"]  # a window that nothing is outside of
    said = {key: value for key, value in UNSAID.items() if key in made} | said
    return {
        prefix + key: (value, made.get(key, "nothing"))
        for key, value in said.items()
        if key not in OTHER
    }


def _in_gguf_words(config: Any) -> dict[str, Any]:
    """A configuration in the words of GGUF."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # one for each kind of layer, in some
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    found = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_epsilon", None),
    }
    if hasattr(config, "query_pre_attn_scalar"):
        found["attention.scale"] = config.query_pre_attn_scalar**-0.5
    if rope:
        found["rope.freq_base"] = rope.get("rope_theta")
        near = config.rope_parameters.get("sliding_attention", rope)
        found["rope.freq_base_swa"] = near.get("rope_theta")
        found["rope.dimension_count"] = int(width * rope.get("partial_rotary_factor", 1.0))
    return found


def _same(given: Any, made: Any) -> bool:
    if isinstance(given, float) and isinstance(made, float | int):
        return math.isclose(given, made, rel_tol=1e-6)  # float32 in the file
    return type(given) is type(made) and bool(given == made)


def _check_tensors(path: Path, header: GgufHeader, model: Any) -> None:
    """Refuse a file that holds more or fewer numbers than its model."""
    factors = _factors(header)
    own = [t for t in header.tensors if t.name not in HEAD and t is not factors]
    held = sum(int(tensor.n_elements) for tensor in own)
    taken = sum(parameter.numel() for parameter in model.parameters())
    if held != taken:
        raise ValueError(
            f"{path}: the file holds {held} numbers and {type(model).__name__} {taken};"
            " transformers does not make the model of this file"
        )


def _factors(header: GgufHeader) -> Any | None:
    """The divisors of the rotary frequencies, where a llama has one for each frequency."""
    width = header.settings.get("llama.rope.dimension_count")
    for tensor in header.tensors:
        if tensor.name == FACTORS and tensor.tensor_type.name == "F32" and isinstance(width, int):
            return tensor if tuple(tensor.shape) == (width // 2,) else None
    return None


def divide_frequencies(path: Path, model: Any) -> None:
    """Divide a model's rotary frequencies by the factors in its file."""
    factors = _factors(read_header(path))
    if factors is None:
        return
    values = torch.from_numpy(np.array(factors.data))
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise ValueError(
            f"{path}: {FACTORS} holds numbers that are not positive; get the file again"
        )
    model.base_model.rotary_emb.inv_freq.div_(values)


def add_special_tokens(path: Path, tokenizer: Any) -> None:
    """Let a tokenizer put the tokens before and after a text that its file says."""
    settings = read_header(path).settings
    begins = settings.get("tokenizer.ggml.model") == "llama"
    begins = begins or settings.get("tokenizer.ggml.pre") in BEGINS
    for name, usual in (("add_bos_token", begins), ("add_eos_token", False)):
        setattr(tokenizer, name, bool(settings.get(f"tokenizer.ggml.{name}", usual)))
