"""Which tokens heads look at: weights are the model's own, sinks are counted, texts are those of
the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.hf.loading import load_model, wrap_model
from esscher.probe import looks as module
from esscher.probe.looks import FIRST, LOGIT, looks
from esscher.probe.session import ProbeContext, make_context
from esscher.probe.spec import ProbeSpec
from tests.models.probe_runs import SMALL, real_model, tiny_model
from tests.real_head import model_folder
from tests.report.test_hostile import HOSTILE

PROSE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune,"
    " must be in want of a wife. " * 9
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(PROSE, "utf-8")
    return path


def context(loaded: Any, path: Path, **fields: Any) -> ProbeContext:
    corpus = {"text": [str(path)], "max_tokens": 150}
    return make_context(
        ProbeSpec.read({"corpus": corpus, "window": 40, "queries": 8, **fields}), loaded
    )


def attentions(model: Any, found: ProbeContext, windows: np.ndarray) -> list[torch.Tensor]:
    """What the model itself says, (W, H, T, T) by layer."""
    with torch.no_grad():
        told = model(**found.inputs(windows), output_attentions=True).attentions
    return [weights.double() for weights in told]


@pytest.fixture
def packaged(text: Path) -> tuple[ProbeContext, list[torch.Tensor]]:
    found = context(load_model(str(model_folder())), text)
    return found, attentions(real_model("eager"), found, np.arange(len(found.windows)))


def test_heaviest_keys_are_those_of_the_model(
    packaged: tuple[ProbeContext, list[torch.Tensor]],
) -> None:
    """Every row against the attention that the model returns, and against its tokenizer."""
    found, weights = packaged
    _, rows = looks(found)
    assert set(rows["query"]) == set(range(module.QUERIES))
    assert len(rows) == 6 * 12 * module.QUERIES * module.KEYS
    words = found.loaded.tokenizer
    ids = torch.from_numpy(found.windows.ids.astype(np.int64))
    asks = module._asking(found)
    where = {
        number: (asks.places.windows[query], asks.places.positions[query])
        for query, number in asks.told.items()
    }
    for (layer, head, number), part in rows.groupby(["layer", "head", "query"]):
        window, at = where[number]
        own = weights[layer][window, head, at]
        best = own.topk(module.KEYS)
        np.testing.assert_allclose(part["weight"], best.values, rtol=1e-4)
        np.testing.assert_allclose(
            own[at - torch.tensor(part["distance"].to_numpy())], part["weight"], rtol=1e-4
        )
        assert part["rank"].tolist() == list(range(module.KEYS))
        keys = ids[window, at - torch.tensor(part["distance"].to_numpy())]
        assert part["key_token"].tolist() == [words.decode([key]) for key in keys]
        assert set(part["query_token"]) == {words.decode([int(ids[window, at])])}
        first = max(0, at - module.AROUND)
        assert set(part["query_before"]) == {
            words.decode(ids[window, first:at], clean_up_tokenization_spaces=False)
        }


def test_sinks_are_counted(
    packaged: tuple[ProbeContext, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: over the queries, the weight of all keys of a token, less what equal weights would
    give it.
    """
    found, weights = packaged
    monkeypatch.setattr(module, "LEAST", -1.0)
    sinks, _ = looks(found)
    assert len(sinks) == 72
    places, words = module._asking(found).places, found.loaded.tokenizer
    for row in sinks.itertuples():
        gets: dict[int, float] = {}
        share: dict[int, float] = {}
        for window, at in zip(places.windows.tolist(), places.positions.tolist(), strict=True):
            seen = ~found.windows.padding[window]
            for key in np.flatnonzero(seen).tolist():
                token = int(found.windows.ids[window, key])
                gets[token] = gets.get(token, 0.0) + float(
                    weights[row.layer][window, row.head, at, key]
                ) / len(places)
                share[token] = share.get(token, 0.0) + 1 / seen.sum() / len(places)
        best = max(gets, key=lambda token: gets[token] - share[token])
        assert row.sink_token == words.decode([best])
        assert row.sink_weight == pytest.approx(gets[best], rel=1e-4)


def test_common_tokens_are_no_sinks(packaged: tuple[ProbeContext, list[torch.Tensor]]) -> None:
    found, _ = packaged
    sinks, _ = looks(found)
    assert not {"a", "of", "in"} & set(sinks["sink_token"])  # a fifth of the text
    assert sinks["sink_token"].mode().tolist() == ["[CLS]"]
    assert len(sinks) < 72  # some heads have none


def test_what_stands_first_is_a_token_of_its_own(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a special token before the text it is called so, with one by the name of that."""
    monkeypatch.setattr(module, "LEAST", -1.0)
    named = {}
    for kind in ("gpt2", "llama"):
        found = context(wrap_model(*tiny_model("llama", kind)), text)
        seen = module._Seen(found, found, {})
        named[kind] = [seen._named(int(group)) for group in seen.groups[:, 0]]
    assert set(named["gpt2"]) == {FIRST}
    assert set(named["llama"]) == {"<s>"}


def test_causal_queries_look_back_and_a_logit_has_no_text(text: Path) -> None:
    found = context(wrap_model(*tiny_model("gpt_oss", "gpt2")), text)
    sinks, rows = looks(found)
    assert (rows.loc[rows["key_token"] != LOGIT, "distance"] >= 0).all()
    logit = rows[rows["key_token"] == LOGIT]
    assert len(logit)
    assert set(logit["key_before"]) == set(logit["key_after"]) == {""}
    whole = rows.groupby(["layer", "head", "query"])["weight"].sum()
    assert (whole <= 1 + 1e-9).all()
    assert set(sinks.columns) == {"layer", "head", "sink_token", "sink_weight"}


def hostile_words() -> Any:
    """A tokenizer whose tokens are hostile, one of them very long."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    raw = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*HOSTILE, "?"])}, unk_token="?")
    )
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("\ue000"), "removed")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?")


def test_hostile_tokens_are_kept_as_they_are_but_short(tmp_path: Path) -> None:
    words = hostile_words()
    path = tmp_path / "hostile.txt"
    path.write_text("\ue000".join(HOSTILE * 20), "utf-8")
    model, _ = tiny_model("bert", vocab_size=len(words))
    found = context(wrap_model(model, words), path)
    _, rows = looks(found)
    seen = set(rows["key_token"]) | set(rows["query_token"])
    assert any("<script>" in token for token in seen)
    assert all(
        len(value) <= module.LONGEST + 1 for name in rows if "_" in name for value in rows[name]
    )
    assert any(token == f"{'x' * module.LONGEST}…" for token in seen)


def test_a_run_has_the_table_and_its_summary_the_sinks(text: Path, tmp_path: Path) -> None:
    run = es.probe(
        texts=[PROSE],
        out=tmp_path / "run",
        **{**SMALL, "max_tokens": 200, "n": "16,64"},
        progress=None,
    )
    rows, heads = run.table("looks"), run.table("heads")
    assert set(zip(rows["layer"], rows["head"], strict=True)) == set(
        zip(heads["layer"], heads["head"], strict=True)
    )
    assert run.columns("looks")["weight"].help.startswith("Share of the query's attention")
    assert heads["sink_token"].notna().all()
    assert "sinks: " in run.summary()
