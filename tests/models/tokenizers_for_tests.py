"""Small fast tokenizers of the kinds models have, trained on the spot, and the packaged model's
own.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
from typing import Any

import pytest

from tests.real_head import model_folder

KINDS = ["bert", "gpt2", "llama", "metaspace", "t5", "words"]


@functools.cache
def prose() -> tuple[str, ...]:
    topics = pydoc_data.topics.topics
    return tuple(topics[name] for name in sorted(topics))


@functools.cache
def tokenizer(kind: str) -> Any:
    """bert: special tokens on both sides. gpt2: none, bytes. llama: one before, spaces prepended by
    the normalizer.

    metaspace: none, spaces prepended by the pre-tokenizer. t5: one after. words: whole words, none
    unknown allowed.
    """
    transformers = pytest.importorskip("transformers")
    if kind == "bert":
        return transformers.AutoTokenizer.from_pretrained(model_folder())
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    texts = prose()[:20]
    names: dict[str, str] = {}
    if kind == "gpt2":
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            show_progress=False,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        raw.train_from_iterator(texts, trainer)
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    elif kind in {"llama", "metaspace"}:
        raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        if kind == "llama":
            raw.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            raw.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        else:
            raw.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=600, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
        )
        raw.train_from_iterator(texts, trainer)
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        if kind == "llama":
            raw.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 1)]
            )
    elif kind == "t5":
        raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
        raw.normalizer = normalizers.NFKC()
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        trainer = trainers.WordPieceTrainer(
            vocab_size=600, show_progress=False, special_tokens=["<pad>", "</s>", "<unk>"]
        )
        raw.train_from_iterator(texts, trainer)
        raw.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
        names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    else:
        raw = Tokenizer(
            models.WordLevel(
                {word: i for i, word in enumerate(["lorem", "ipsum", "dolor", "sit", "amet"])}
            )
        )
        raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **names)


def plain_ids(kind: str, text: str) -> list[int]:
    """The tokenizer's own answer for the whole text."""
    found: list[int] = tokenizer(kind)(
        text, add_special_tokens=False, truncation=False, verbose=False
    )["input_ids"]
    return found
