"""Models from folders: what is read, what is refused, and the one line a user gets."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from esscher.hf.loading import Loaded, load_model, outline_model, wrap_model
from tests.models.tiny import FAMILIES, REFUSED, Family, build, inputs_of, model_of

safetensors = pytest.importorskip("safetensors.torch")


def family_options(name: str) -> tuple[str, dict[str, Any]]:
    family = next(family for family in FAMILIES if family.name == name)
    return family.config, family.options


def saved(name: str, folder: Path, **options: Any) -> Path:
    build(*family_options(name), **options).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("bert", tmp_path_factory.mktemp("bert"))


def refused(name: Any, **options: Any) -> str:
    """The complaint, which is one line."""
    with pytest.raises(ValueError, match=r".") as caught:
        load_model(name, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


def changed(folder: Path, to: Path, change: Any) -> Path:
    """A copy of a model folder with changed tensors."""
    tensors = change(safetensors.load_file(folder / "model.safetensors"))
    to.mkdir(exist_ok=True)
    (to / "config.json").write_text((folder / "config.json").read_text())
    safetensors.save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'esscher[hf]'" in refused(None)


def test_a_folder_is_loaded_as_it_is(bert: Path) -> None:
    loaded = load_model(bert)
    assert (loaded.name, loaded.layers, loaded.heads, loaded.width, loaded.max_positions) == (
        bert.name,
        2,
        4,
        8,
        64,
    )
    assert loaded.tokenizer is None
    assert loaded.tokenizer_error == "the model comes without the files of a tokenizer"
    family, model = model_of("bert")
    with torch.no_grad():
        assert torch.equal(loaded.model(**inputs_of(family))[0], model(**inputs_of(family))[0])


def test_dtype_is_the_one_asked_for_whatever_the_file_has(bert: Path, tmp_path: Path) -> None:
    half = changed(
        bert, tmp_path, lambda tensors: {key: value.half() for key, value in tensors.items()}
    )
    assert next(load_model(half).model.parameters()).dtype == torch.float32
    assert next(load_model(bert, dtype="float64").model.parameters()).dtype == torch.float64
    assert "expected one of float32" in refused(bert, dtype="int8")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "vit"])
def test_heads_and_causality_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    loaded = load_model(saved(name, tmp_path))
    assert (loaded.layers, loaded.heads, loaded.kv_heads) == (
        family.layers,
        family.heads,
        family.kv_heads,
    )
    assert (loaded.width, loaded.causal) == (family.width, family.causal)
    assert [shape.heads for shape in loaded.shapes] == [family.heads] * family.layers


@pytest.mark.parametrize(("name", "layers"), [("t5", 2), ("bart", 3)])
def test_of_an_encoder_decoder_the_encoder_is_kept(name: str, layers: int, tmp_path: Path) -> None:
    loaded = load_model(saved(name, tmp_path))
    assert (loaded.layers, loaded.causal) == (layers, False)
    assert not any("decoder" in key for key, _ in loaded.model.named_parameters())


def test_roberta_counts_positions_after_padding(tmp_path: Path) -> None:
    """Position ids start at pad + 1, so two of the rows for pad_token_id = 1 are never reached: 512
    of 514 in the original.
    """
    config, options = family_options("roberta")
    build(config, {**options, "pad_token_id": 1, "bos_token_id": 0}).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.max_positions == 62
    ids = torch.randint(3, 61, (1, 62))
    with torch.no_grad():
        loaded.model(input_ids=ids)
        with pytest.raises((IndexError, RuntimeError)):
            loaded.model(input_ids=torch.cat([ids, ids[:, :1]], dim=1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    bad: float, bert: Path, tmp_path: Path
) -> None:
    key = "encoder.layer.1.attention.self.key.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[key][3, 4] = bad
        return tensors

    assert f"weight {key} holds 1 NaN or infinite of 1024 numbers" in refused(
        changed(bert, tmp_path, spoil)
    )


def test_a_checkpoint_with_missing_tensors_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = changed(
        bert,
        tmp_path,
        lambda tensors: {key: value for key, value in tensors.items() if "layer.1" not in key},
    )
    assert "lacks 16 tensors of BertModel, the first is encoder.layer.1" in refused(folder)
    head = changed(
        bert,
        tmp_path / "b",
        lambda tensors: {key: value for key, value in tensors.items() if "pooler" not in key},
    )
    assert load_model(head).layers == 2


def test_a_pickled_checkpoint_is_refused_unread(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04 this would have run code")
    text = refused(tmp_path)
    assert "no *.safetensors in this folder; files that can run code" in text
    assert "save_pretrained" in text


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}})
    )
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    assert "code of its own, which is never run" in refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        (
            '{"model_type": "no_such_type"}',
            "model type `no_such_type` but Transformers does not recognize",
        ),
    ],
)
def test_a_bad_configuration_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert message in refused(tmp_path)


def test_a_broken_weights_file_is_refused(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    assert "cannot be read" in refused(tmp_path)


def test_names_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    assert "no such model folder" in refused(tmp_path / "nothing")
    assert "no config.json" in refused(tmp_path)
    assert "no such folder here, and not " in refused("nobody/no-such-model")
    assert "no such model folder" in refused(" ")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "no *.safetensors" in refused(tmp_path)
    assert "expected a model folder" in refused(tmp_path / "config.json")


def test_a_device_that_is_not_there_is_refused(bert: Path) -> None:
    assert "cannot be used here" in refused(bert, device="nowhere")
    if not torch.cuda.is_available():
        assert "cannot be used here" in refused(bert, device="cuda")


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_models_that_cannot_be_captured_are_refused_when_loaded(name: str, tmp_path: Path) -> None:
    build(*REFUSED[name]).save_pretrained(tmp_path)
    assert "what works: albert, bert" in refused(tmp_path)


def test_a_model_of_which_layers_escape_is_refused_when_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a run over all its other layers."""
    build(*family_options("bert")).save_pretrained(tmp_path)
    monkeypatch.setattr(
        importlib.import_module("esscher.hf.capture"),
        "expected_layers",
        lambda model: 3,
    )
    assert "has 3 attention layers by its configuration, 2 were captured" in refused(tmp_path)


def test_several_weight_files_have_one_hash(tmp_path: Path) -> None:
    model = build(*family_options("bert"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    first = load_model(tmp_path).sha256
    assert first == load_model(tmp_path).sha256
    assert len(first) == 64


def test_a_model_object_is_wrapped_unchanged() -> None:
    family, model = model_of("llama")
    loaded = wrap_model(model, name="mine")
    assert isinstance(loaded, Loaded)
    assert loaded.model is model
    assert (loaded.name, loaded.layers, loaded.kv_heads, loaded.causal) == (
        "mine",
        family.layers,
        2,
        True,
    )
    assert loaded.sha256 == wrap_model(model).sha256
    other = build(family.config, family.options, family.model)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    assert wrap_model(other).sha256 != loaded.sha256
    with pytest.raises(ValueError, match="own code"):
        wrap_model(build(*REFUSED["bloom"]))
    with pytest.raises(ValueError, match="training mode"):
        wrap_model(build(*family_options("bert")).train())


def test_loading_says_nothing(bert: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(bert)
    assert capfd.readouterr() == ("", "")


# masks whose numbers these models ask for, and experts chosen by value
NEED_NUMBERS = ("t5",)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_outline_is_the_model_without_its_weights(family: Family, tmp_path: Path) -> None:
    build(family.config, family.options, family.model).save_pretrained(tmp_path)
    outline = outline_model(tmp_path, with_head=True)
    if family.name in NEED_NUMBERS:
        assert outline is None
        return
    loaded = load_model(tmp_path, with_head=True)
    assert outline is not None
    for name in ("shapes", "layers", "max_positions", "causal", "hidden_size", "name"):
        assert getattr(outline, name) == getattr(loaded, name)
    assert all(parameter.is_meta for parameter in outline.model.parameters())
