"""GGUF files: the weights are those that were written, attention is that of the same model in
safetensors, or it is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.hf.call import AttentionCall
from esscher.hf.capture import forward
from esscher.hf.checkpoint import sha256_of
from esscher.hf.gguf import ARCHITECTURES
from esscher.hf.loading import load_model
from esscher.runs.errors import RunError
from tests.models.tiny import build, transformers
from tests.models.tiny_gguf import VOCABULARY, WRITTEN, gguf, model_of, write_gguf
from tests.models.tokenizers_for_tests import prose, tokenizer

IDS = torch.randint(3, VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))


def attention(model: Any) -> list[tuple[torch.Tensor, ...]]:
    """Queries, keys, values and outputs of every layer."""
    found: list[tuple[torch.Tensor, ...]] = []

    def see(captured: AttentionCall) -> None:
        found.append((captured.query, captured.key, captured.value))

    with torch.no_grad():
        forward(model, {"input_ids": IDS}, see)
        found.append((model(input_ids=IDS).last_hidden_state,))
    return found


def refused(name: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load_model(name, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


def test_every_architecture_that_is_read_is_compared() -> None:
    assert {written.architecture for written in WRITTEN.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_is_that_of_the_same_model_in_safetensors(name: str, tmp_path: Path) -> None:
    """Rotated queries and keys, values and last states to 1e-6: rows permuted for llama, norms
    moved for gemma, ...
    """
    model = model_of(name)
    model.save_pretrained(tmp_path / "folder")
    path = write_gguf(tmp_path / "model.gguf", name, model)
    loaded, plain = load_model(path), load_model(tmp_path / "folder")
    assert loaded.name == "model"
    assert loaded.shapes == plain.shapes
    assert loaded.sha256 == sha256_of([path])
    for mine, theirs in zip(attention(loaded.model), attention(plain.model), strict=True):
        for left, right in zip(mine, theirs, strict=True):
            assert (left - right).abs().max() <= 1e-6 * right.abs().max()


def q8_0(block: np.ndarray) -> np.ndarray:
    """32 numbers in 34 bytes: a float16 d, then int8; x = d q."""
    scale = block[:, :2].copy().view(np.float16).astype(np.float64)
    return scale * block[:, 2:].copy().view(np.int8)


def q4(block: np.ndarray, begin: int) -> np.ndarray:
    """The low halves of 16 bytes, then their high halves."""
    return np.concatenate([block[:, begin:] & 15, block[:, begin:] >> 4], axis=1).astype(np.float64)


def q4_0(block: np.ndarray) -> np.ndarray:
    """32 numbers in 18 bytes: a float16 d, then 4 bits each; x = d (q - 8)."""
    return block[:, :2].copy().view(np.float16).astype(np.float64) * (q4(block, 2) - 8)


def q4_1(block: np.ndarray) -> np.ndarray:
    """32 numbers in 20 bytes: float16 d and m, then 4 bits each; x = d q + m."""
    scale, least = (
        block[:, at : at + 2].copy().view(np.float16).astype(np.float64) for at in (0, 2)
    )
    return scale * q4(block, 4) + least


UNPACK = {"Q8_0": (34, q8_0), "Q4_0": (18, q4_0), "Q4_1": (20, q4_1)}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *UNPACK])
def test_weights_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    """Dequantised by hand from the bytes of the file, the rows of queries and keys put back in
    their order.
    """
    model = model_of("llama")
    path = write_gguf(tmp_path / "model.gguf", "llama", model, kind)
    loaded = load_model(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for key, weights in loaded.model.state_dict().items():
        tensor = raw[names.get_name(f"model.{key}", (".weight",))]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        data = np.asarray(tensor.data)
        if tensor.tensor_type.name in UNPACK:
            size, unpack = UNPACK[tensor.tensor_type.name]
            expected = unpack(data.reshape(-1, size)).reshape(shape)
        elif tensor.tensor_type.name == "BF16":
            expected = (
                (data.reshape(-1).view(np.uint16).astype(np.uint32) << 16)
                .view(np.float32)
                .reshape(shape)
            )
        else:
            expected = data.astype(np.float64)
        if ".self_attn.q_proj" in key or ".self_attn.k_proj" in key:
            heads, width = shape[0] // 16, 16
            expected = expected.reshape(heads, width // 2, 2, -1).swapaxes(1, 2).reshape(shape)
        assert weights.dtype == torch.float32
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6, atol=0)


def test_the_dtype_that_is_wanted_is_made(tmp_path: Path) -> None:
    loaded = load_model(
        write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"), "Q8_0"), dtype="bfloat16"
    )
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_what_lies_beside_the_file_is_not_read(tmp_path: Path) -> None:
    """A folder of downloads may hold the files of other models, and code."""
    path = write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"))
    alone = load_model(path)
    for name in (
        "config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "adapter_config.json",
        "generation_config.json",
    ):
        (tmp_path / name).write_text(
            '{"model_type": "bert", "auto_map": {"AutoModel": "code.Model", "AutoTokenizer":'
            ' ["code.T", null]}}'
        )
    (tmp_path / "code.py").write_text("raise SystemExit")
    again = load_model(path)
    assert (again.layers, again.causal) == (alone.layers, alone.causal)
    assert again.tokenizer("some words")["input_ids"] == alone.tokenizer("some words")["input_ids"]


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [0]),
    ],
)
def test_tokens_around_a_text_are_those_of_the_file(
    settings: dict[str, bool], before: list[int], after: list[int], tmp_path: Path
) -> None:
    model = model_of("llama")
    given = {f"!tokenizer.ggml.{key}": value for key, value in settings.items()}
    read = load_model(write_gguf(tmp_path / "model.gguf", "llama", model, settings=given)).tokenizer
    inside = tokenizer("gpt2")("some words")["input_ids"]
    assert len(inside) > 1
    assert read("some words")["input_ids"] == [*before, *inside, *after]
    assert read.decode(inside) == "some words"


def test_pieces_with_scores_are_a_tokenizer_that_begins_a_text(tmp_path: Path) -> None:
    """Llama's own kind: no merges in the file, and what begins a text goes without saying."""
    path = write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"), words="llama")
    mine, theirs = load_model(path).tokenizer, tokenizer("llama")
    for text in prose()[:5]:
        assert mine(text)["input_ids"] == theirs(text)["input_ids"]
    assert mine("word")["input_ids"][0] == theirs.bos_token_id


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rope.scaling.type": "linear"}, "llama.rope.scaling.type = 'linear'"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "llama.rope.scaling"),
        ({"attention.sliding_window": 8}, "llama.attention.sliding_window = 8, transformers"),
        ({"attn_logit_softcapping": 30.0}, "llama.attn_logit_softcapping = 30.0"),
        ({"attention.scale": 0.5}, "llama.attention.scale = 0.5"),
        ({"rope.dimension_count": 8}, "llama.attention.key_length = 16"),
        ({"rope.freq_base": None}, None),
        ({"expert_used_count": 2}, "llama.expert_used_count = 2"),
        ({"block_count": 1}, "holds"),
        ({"block_count": 3}, "holds"),
        (
            {"block_count": 4_000_000_000},
            "expected a number of layers that 20 tensors can make, got 4000000000",
        ),
        ({"vocab_size": 699}, "its tokenizer has 700 words, its embedding 699"),
        ({"embedding_length": 4_000_000_000}, "holds"),
    ],
)
def test_a_setting_that_the_reader_drops_is_refused(
    settings: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    """Without the refusal the model is read, and its attention is another's."""
    path = write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"), settings=settings)
    if said is None:  # what the file does not say is llama.cpp's default, and the model's
        assert load_model(path).model.config.rope_parameters["rope_theta"] == 10000.0
    else:
        assert said in refused(path)


def test_settings_without_effect_are_no_reason(tmp_path: Path) -> None:
    idle = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 4.0,
        "attention.sliding_window": 64,
        "tensor_data_layout": "x",
    }
    assert (
        load_model(
            write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"), settings=idle)
        ).layers
        == 2
    )


@pytest.mark.parametrize(
    "name",
    ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.1.attn_q_norm.weight", "blk.2.attn_q.weight"],
)
def test_a_tensor_without_a_place_is_refused(name: str, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", "llama", model_of("llama"), more={name: np.ones(16, np.float32)}
    )
    assert "transformers does not make the model of this file" in refused(path)


def test_factors_of_frequencies_are_used(tmp_path: Path) -> None:
    """Llama 3.1 and later: positions are scaled by a tensor of factors, which the reader leaves
    out.
    """
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = build("LlamaConfig", {**WRITTEN["llama"].options, "rope_parameters": rope})
    usual = 5000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    factors = (usual / model.rotary_emb.inv_freq.double()).float().numpy()
    assert (factors.min(), factors.max()) == pytest.approx((1, 8), rel=1e-5)
    loaded = load_model(
        write_gguf(tmp_path / "model.gguf", "llama", model, more={"rope_freqs.weight": factors})
    )
    for mine, theirs in zip(attention(loaded.model), attention(model), strict=True):
        for left, right in zip(mine, theirs, strict=True):
            assert (left - right).abs().max() <= 1e-5 * right.abs().max()
    path = write_gguf(
        tmp_path / "bad.gguf", "llama", model, more={"rope_freqs.weight": 0 * factors}
    )
    assert "rope_freqs.weight holds numbers that are not positive" in refused(path)


def test_a_folder_of_a_file_names_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"))
    assert f"no config.json in this folder; give the file: {path}" in refused(tmp_path)
    model_of("llama").config.save_pretrained(tmp_path)
    assert f"no *.safetensors in this folder; give the file: {path}" in refused(tmp_path)


def test_a_file_has_no_revisions(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"))
    assert "revision: model is on this machine and has no revisions, got 'main'" in refused(
        path, revision="main"
    )


def test_an_output_head_is_left_out(tmp_path: Path) -> None:
    more = {"output.weight": np.ones((VOCABULARY, 64), np.float32)}
    assert (
        load_model(
            write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"), more=more)
        ).layers
        == 2
    )


def test_a_model_whose_scale_is_not_in_the_file_is_refused(tmp_path: Path) -> None:
    """The scores of gemma2's largest model are divided by the root of 144; its file does not say
    so, nor does the reader.
    """
    model = transformers.AutoModel.from_config(
        transformers.Gemma2Config(
            **{**WRITTEN["gemma2"].options, "head_dim": 128, "query_pre_attn_scalar": 144}
        )
    )
    assert "gemma2.attention.scale" in refused(
        write_gguf(tmp_path / "model.gguf", "gemma2", model.eval())
    )


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "compressed-tensors"]
)
def test_quantised_safetensors_are_refused_before_anything_is_read(
    method: str, tmp_path: Path
) -> None:
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    assert "its weights are quantised" in refused(tmp_path)


def test_a_probe_reads_a_file_and_is_resumed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", model_of("llama"), "Q8_0")
    monkeypatch.chdir(tmp_path)
    settings = {"window": 32, "max_tokens": 128, "queries": 4, "layers": (0,), "heads": (0,)}
    made = es.probe("model.gguf", prose()[0], out=tmp_path / "run", **settings)
    about = made.table("about").iloc[0]
    assert about["model_sha256"] == sha256_of([path])
    monkeypatch.chdir("/")
    again = es.probe(path, prose()[0], out=tmp_path / "run", **settings)
    assert again.table("heads").equals(made.table("heads"))
    write_gguf(path, "llama", model_of("llama"), "Q4_0")
    with pytest.raises(RunError, match="its model changed since it began"):
        es.probe(path, prose()[0], out=tmp_path / "run", **settings)
