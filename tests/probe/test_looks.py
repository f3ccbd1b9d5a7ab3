"""Which tokens heads look at: weights are the model's own, sinks are counted, texts are those of
the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import esscher as es
from esscher.hf.loading import load_model, wrap_model
from esscher.probe.measure import layer_tables
from esscher.probe.pools import capture_queries, corpus_layer
from esscher.probe.session import Session, open_session
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics import weights as module
from esscher.probe.statistics.weights import FIRST, LOGIT, told_queries
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


def context(loaded: Any, path: Path, **fields: Any) -> Session:
    corpus = {"text": [str(path)], "max_tokens": 150}
    return open_session(
        ProbeSpec.read({"corpus": corpus, "window": 40, "queries": 8, "pool": "corpus", **fields}),
        loaded,
    )


def looks(found: Session) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of heads, and the table."""
    tables = [layer_tables(found, corpus_layer(found, layer, 0)) for layer in found.layers]
    heads, rows = (pd.concat([table[name] for table in tables]) for name in ("heads", "looks"))
    return heads, rows


def asking(found: Session) -> dict[int, list[int]]:
    """Positions of each window that sinks are found from."""
    asked = {}
    for window, told in told_queries(found).items():
        text = np.flatnonzero(found.windows.text[window])
        few = np.linspace(0, len(text) - 1, min(module.ASKING, len(text))).round().astype(int)
        asked[window] = sorted({*text[few].tolist(), *told})
    return asked


def attentions(model: Any, found: Session, windows: np.ndarray) -> list[torch.Tensor]:
    """What the model itself says, (W, H, T, T) by layer."""
    with torch.no_grad():
        told = model(**found.inputs(windows), output_attentions=True).attentions
    return [weights.double() for weights in told]


@pytest.fixture
def packaged(text: Path) -> tuple[Session, list[torch.Tensor]]:
    found = context(load_model(str(model_folder())), text)
    return found, attentions(real_model("eager"), found, np.arange(len(found.windows)))


def test_heaviest_keys_are_those_of_the_model(
    packaged: tuple[Session, list[torch.Tensor]],
) -> None:
    """Every row against the attention that the model returns, and against its tokenizer."""
    found, weights = packaged
    _, rows = looks(found)
    assert set(rows["query"]) == set(range(module.QUERIES))
    assert len(rows) == 6 * 12 * module.QUERIES * module.KEYS
    words = found.loaded.tokenizer
    ids = torch.from_numpy(found.windows.ids.astype(np.int64))
    where = {
        number: (window, at)
        for window, own in told_queries(found).items()
        for at, number in own.items()
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
    packaged: tuple[Session, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: over the queries, the weight of all keys of a token, less what equal weights would
    give it.
    """
    found, weights = packaged
    monkeypatch.setattr(module, "LEAST", -1.0)
    sinks, _ = looks(found)
    assert len(sinks) == 72
    places = [(window, at) for window, own in asking(found).items() for at in own]
    words = found.loaded.tokenizer
    for row in sinks.itertuples():
        gets: dict[int, float] = {}
        share: dict[int, float] = {}
        for window, at in places:
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


def test_common_tokens_are_no_sinks(packaged: tuple[Session, list[torch.Tensor]]) -> None:
    found, _ = packaged
    sinks, _ = looks(found)
    assert not {"a", "of", "in"} & set(sinks["sink_token"])  # a fifth of the text
    assert sinks["sink_token"][sinks["sink_token"] != ""].mode().tolist() == ["[CLS]"]
    assert (sinks["sink_token"] == "").any()  # some heads have none


def test_what_stands_first_is_a_token_of_its_own(text: Path) -> None:
    """Without a special token before the text it is called so, with one by the name of that."""
    for kind, name in (("gpt2", FIRST), ("llama", "<s>")):
        found = context(wrap_model(*tiny_model("llama", kind)), text)
        pooled = capture_queries(found, [0])[0].windows[0]["looks"]
        special = int(found.windows.ids[0, 0]) if kind == "llama" else module.FIRST_ID
        assert special in pooled["token"].tolist()
        assert name == FIRST or found.loaded.tokenizer.decode([special]) == name


def test_causal_queries_look_back_and_a_logit_has_no_text(text: Path) -> None:
    found = context(wrap_model(*tiny_model("gpt_oss", "gpt2")), text)
    sinks, rows = looks(found)
    assert (rows.loc[rows["key_token"] != LOGIT, "distance"] >= 0).all()
    logit = rows[rows["key_token"] == LOGIT]
    assert len(logit)
    assert set(logit["key_before"]) == set(logit["key_after"]) == {""}
    whole = rows.groupby(["layer", "head", "query"])["weight"].sum()
    assert (whole <= 1 + 1e-9).all()
    assert LOGIT in set(sinks["sink_token"]) | {LOGIT}


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


def test_a_run_has_the_table(text: Path, tmp_path: Path) -> None:
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
