"""Small runs whose tables are kept: probes and compression runs of tiny models, one Monte Carlo
run, two runs of the in-context lab, and the verdicts of three claims.

Weights, text and tokenizer are made by numpy's generators and plain lists, in float64, so that the
same numbers come out of every processor. ``python -m tests.snapshot`` writes the tables anew: only
where a change of numbers is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.cli import main

USUAL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA = {
    **USUAL,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

WORDS = [f"w{number}" for number in range(57)]
PROBE = {
    "queries": 12,
    "kept_queries": 5,
    "dtype": "float64",
    "max_tokens": 220,
    "window": 24,
    "epsilons": (0.1, 0.3),
}


def text() -> list[str]:
    """Three documents of words with unequal frequencies."""
    generator = np.random.default_rng(3)
    shares = 1.0 / np.arange(1, len(WORDS) + 1)
    return [" ".join(generator.choice(WORDS, size=130, p=shares / shares.sum())) for _ in range(3)]


def tokenizer() -> Any:
    """Whole words; one special token before a text."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    raw = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
        )
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def model(config: str, options: dict[str, Any], kind: str = "AutoModel") -> Any:
    """A tiny model in float64, its weights large enough that attention is far from uniform."""
    transformers = pytest.importorskip("transformers")
    made = (
        getattr(transformers, kind)
        .from_config(getattr(transformers, config)(**options))
        .eval()
        .double()
    )
    generator = np.random.default_rng(17)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            drawn = torch.from_numpy(generator.normal(size=tuple(parameter.shape)))
            parameter.copy_(
                1.0 + 0.1 * drawn
                if "norm" in name.lower() and parameter.ndim == 1
                else 0.25 * drawn
            )
    return made


def encoder() -> Any:
    return model("BertConfig", USUAL)


def causal() -> Any:
    return model("LlamaConfig", LLAMA)


def probe(folder: Path, made: Callable[[], Any], **settings: Any) -> None:
    es.probe(made(), text(), tokenizer=tokenizer(), out=folder, **{**PROBE, **settings})


def command(folder: Path, line: str) -> None:
    """A command of the command line, its flags separated by spaces."""
    with pytest.raises(SystemExit) as stop:
        main([*line.split(), "--out", str(folder)])
    assert not stop.value.code


def converge(folder: Path) -> None:
    """Two scales of a head on Gaussian tokens, from a YAML file beside the run."""
    spec = folder.parent / f"{folder.name}.yaml"
    spec.write_text(
        "job: converge\ntitle: small\nlaw: {law: gaussian, dim: 3, variance: 0.5}\nhead: {kind:"
        " identity}\nsweep: {over: scale, values: [0.5, 2.0]}\nn: 20:200:4\nrepeats: 6\nmetrics:"
        " [mean, cov, l2, uniform]\ndtype: float64\n"
    )
    command(folder, f"converge {spec} --no-report")


def compress(folder: Path, made: Callable[[], Any], flags: str) -> None:
    """Keys dropped in a model that is saved beside the run, on a text beside it."""
    home = folder.parent / f"{folder.name}-model"
    made().save_pretrained(home)
    tokenizer().save_pretrained(home)
    words = home / "text.txt"
    words.write_text("\n".join(text()))
    sizes = "--texts 3 --window 30 --keep 0.2,0.5 --sinks 2 --recent 2 --dtype float64"
    command(folder, f"compress {home} --text {words} {sizes} {flags}")


def claims(folder: Path) -> None:
    """Verdicts of three quick claims: on laws, on the in-context lab, on the limit."""
    command(folder, "reproduce b-5-support s-25-singular s-17-limit --quick --seed 3")


RUNS: dict[str, Callable[[Path], None]] = {
    "corpus": lambda folder: probe(folder, encoder, heads=(0, 3)),
    "parts": lambda folder: probe(folder, encoder, heads=(1,), part=80),
    "sequence": lambda folder: probe(
        folder, causal, heads=(0, 1, 3), pool="sequence", window=40, rules="none"
    ),
    "moments": lambda folder: probe(
        folder, encoder, heads=(2,), layers=(1,), moments=4, moments_n=(16, 32, 64)
    ),
    "converge": converge,
    "icl_train": lambda folder: command(
        folder,
        "icl train --dim 2 --covariance kms:0.3 --lengths 4,8 --seeds 2 --steps 40 --rate 0.02",
    ),
    "icl_flow": lambda folder: command(
        folder, "icl flow --dim 2 --covariance isotropic --lengths 10,50"
    ),
    "rules": lambda folder: probe(
        folder, causal, pool="sequence", window=40, queries=24, kept_queries=24, max_tokens=120
    ),
    "compress": lambda folder: compress(
        folder,
        lambda: model("LlamaConfig", LLAMA, "AutoModelForCausalLM"),
        "--decode 10 --observe 8 --splits uniform --splits cut --rules sinks:2+heavy "
        "--rules sinks:2+recent:4+impact --rules sinks:2+random "
        "--rules fisher --rules kvzip --together --sensitivity --check",
    ),
    "compress_encoder": lambda folder: compress(
        folder, encoder, "--rules random --rules heavy --rules topk"
    ),
    "claims": claims,
}
