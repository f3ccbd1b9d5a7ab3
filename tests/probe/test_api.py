"""es.probe from Python: what a model and texts may be, what is refused, heads that fail, small and
odd pools.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.probe import pools
from esscher.probe.job import check_measured
from esscher.runs import Progress, RunError, list_runs
from tests.models.probe_runs import (
    CONTRACT,
    SMALL,
    few_texts,
    pooled_tensors,
    save_tiny,
    source,
    tiny_model,
)
from tests.models.tokenizers_for_tests import tokenizer
from tests.report.atlas import ProbeLike, store_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def test_objects_folders_strings_and_paths_agree(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text in three guises through one model in three guises."""
    monkeypatch.chdir(tmp_path)
    text = "\n".join(few_texts())
    path = tmp_path / "prose.txt"
    path.write_text(text, encoding="utf-8")
    model, words = tiny_model("bert")
    runs = [
        es.probe(model, [text], tokenizer=words, **SMALL),
        es.probe(str(folder), text, out=tmp_path / "one", **SMALL),
        es.probe(folder, path, out=tmp_path / "two", **SMALL),
        es.probe(folder, [path], out=str(tmp_path / "three"), **SMALL),
        es.probe(folder, str(path), out=tmp_path / "four", **SMALL),
    ]
    for run in runs:
        assert run.status == "complete"
        assert list(run.table("heads")["head"]) == [1, 2]
        assert list(run.table("about")["keys"]) == [300]
    first, *others = (run.table("curves") for run in runs)
    for other in others:
        np.testing.assert_allclose(first["rms"], other["rms"], rtol=1e-5, atol=1e-12)
    assert set(runs[0].tables) >= {
        "heads",
        "curves",
        "tails",
        "layers",
        "about",
    }
    again = es.load_run(tmp_path / "two")
    assert again.table("heads").equals(runs[2].table("heads"))


def test_several_documents_and_separate_windows(folder: Path, tmp_path: Path) -> None:
    run = es.probe(
        folder, few_texts()[:3], out=tmp_path, documents="separate", **{**SMALL, "max_tokens": None}
    )
    (about,) = run.table("about").to_dict("records")
    assert about["documents"] == 3
    assert about["keys"] == source(run).windows.tokens


def test_other_texts_in_the_folder_of_a_run_are_refused(folder: Path, tmp_path: Path) -> None:
    """Also within one process, which has the first texts in memory."""
    first = es.probe(folder, few_texts()[:3], out=tmp_path, **SMALL)
    before = first.table("heads")
    with pytest.raises(RunError):
        es.probe(folder, few_texts()[3:6], out=tmp_path, **SMALL)
    assert es.load_run(tmp_path).table("heads").equals(before)
    same = es.probe(folder, few_texts()[:3], out=tmp_path, **SMALL)
    assert same.table("heads").equals(before)


def test_a_file_that_changed_is_read_again(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("\n".join(few_texts()[:3]), encoding="utf-8")
    one = es.probe(folder, path, out=tmp_path / "one", **SMALL)
    path.write_text("\n".join(few_texts()[5:9]), encoding="utf-8")
    two = es.probe(folder, path, out=tmp_path / "two", **SMALL)
    assert one.manifest.hashes["corpus"] != two.manifest.hashes["corpus"]


def test_one_model_with_two_tokenizers(tmp_path: Path) -> None:
    model, words = tiny_model("bert", "gpt2")
    path = tmp_path / "prose.txt"
    path.write_text("\n".join(few_texts()), encoding="utf-8")
    runs = [
        es.probe(model, path, tokenizer=kind, out=tmp_path / str(i), **SMALL)
        for i, kind in enumerate((words, tokenizer("llama")))
    ]
    assert runs[0].manifest.hashes["corpus"] != runs[1].manifest.hashes["corpus"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "texts: expected strings .* got nothing"),
        ([3], "texts: .*got int"),
        (["a", Path("b")], "texts: .*one kind, got"),
        ("/no/such/prose.txt", "texts: '/no/such/prose.txt' looks like a file and there is none"),
        (["a document", "prose.txt"], "texts: 'prose.txt' looks like a file"),
        ("   ", "text"),
        (Path("nowhere.txt"), "nowhere.txt"),
    ],
)
def test_texts_that_cannot_be_used(folder: Path, tmp_path: Path, texts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        es.probe(folder, texts, out=tmp_path / "run", **SMALL)


def test_settings_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    model, words = tiny_model("bert")
    text = few_texts()
    for settings, message in (
        ({"layers": (2,)}, "layers: .* has layers 0 to 1, got 2"),
        ({"heads": (4,)}, "heads: .* has heads 0 to 3, got 4"),
        ({"window": 65}, "at most 64 positions, got 65; use --window 64"),
        ({"n": "16,301"}, "the pool has 300 keys, got n = 301"),
        ({"epsilons": (1.5,)}, "between 0 and 1"),
        ({"pool": "everything"}, "pool"),
        ({"colour": "red"}, "colour: no such field"),
        ({"layerz": 3}, "layerz: no such field"),
        ({"layers": ()}, "whole numbers"),
        ({"moments": 2, "moments_n": "8,400"}, "moments_n: the pool has 300 keys, got n = 400"),
        ({"moments": 2, "pool": "sequence", "n": "16"}, "moments: .*--pool corpus"),
    ):
        with pytest.raises(ValueError, match=message):
            es.probe(model, text, tokenizer=words, out=tmp_path / "run", **{**SMALL, **settings})
    with pytest.raises(ValueError, match="no tokenizer"):
        es.probe(model, text, out=tmp_path / "run", **SMALL)
    with pytest.raises(ValueError, match="stays in this process"):
        es.probe(model, text, tokenizer=words, out=tmp_path / "run", workers=2, **SMALL)


# ---- heads that fail
# -------------------------------------------------------------------------------------------------


def check_failed(run: es.Run, head: int, reason: str) -> None:
    heads = run.table("heads").set_index("head")
    assert run.status == "complete"
    assert heads["status"][head] == "failed"
    assert reason in heads["reason"][head]
    assert heads["regime"][head] == "unknown"
    assert math.isnan(heads["beta_fit"][head])
    assert set(CONTRACT) <= {*heads.columns, "head"}
    assert heads["n_keys"][head] == 300
    assert (heads["status"].drop(head) == "ok").all()
    assert head not in set(run.table("curves")["head"])


@pytest.mark.parametrize("part", [1000, 120])
def test_a_head_that_fails_has_a_row_with_the_reason(
    folder: Path, tmp_path: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pools._head_state

    def broken(session: Any, pooled: Any, head: int, *rest: Any) -> Any:
        if head == 1:
            raise ValueError("nothing to be seen")
        return plain(session, pooled, head, *rest)

    monkeypatch.setattr(pools, "_head_state", broken)
    run = es.probe(folder, few_texts(), out=tmp_path, **{**SMALL, "part": part})
    check_failed(run, 1, "nothing to be seen")


def wide_model() -> tuple[Any, Any]:
    """A head whose scores are so far apart that each query sees its largest alone."""
    model, words = tiny_model("bert")
    with torch.no_grad():
        query = model.encoder.layer[1].attention.self.query
        query.weight[8:16] *= 1e8
        query.bias[8:16] *= 1e8
    return model, words


def test_scores_wider_than_the_grid_are_a_failed_head_where_keys_stream(tmp_path: Path) -> None:
    model, words = wide_model()
    run = es.probe(model, few_texts(), tokenizer=words, out=tmp_path, **{**SMALL, "part": 120})
    check_failed(run, 1, "nats")


def test_scores_wider_than_the_grid_are_measured_where_keys_are_held(tmp_path: Path) -> None:
    """Against hardmax: of n draws from N keys the one of rank r decides with chance ((N-r)/N)^n -
    ((N-r-1)/N)^n.
    """
    model, words = wide_model()
    run = es.probe(model, few_texts(), tokenizer=words, out=tmp_path, **SMALL)
    row = run.table("heads").set_index("head").loc[1]
    assert row["status"] == "ok"
    q, k, v = (x[1].detach().double() for x in pooled_tensors(source(run), 1))
    scores = q @ k.T / q.shape[-1] ** 0.5
    order = scores.argsort(1, descending=True)
    assert float(scores.gather(1, order).diff(dim=1).abs().quantile(0.02)) > 50
    rest = torch.arange(300, -1, -1, dtype=torch.float64) / 300
    away = (v[order] - v[order[:, :1]]).square().sum(2)  # (m, N)
    curves = run.table("curves").query("head == 1")
    for n, rms in curves.query("metric == 'l2' and n <= 256")[["n", "rms"]].to_numpy():
        chance = rest[:-1] ** n - rest[1:] ** n
        assert rms**2 == pytest.approx(float((away @ chance).mean()), rel=0.02)
    assert row["effective_tokens"] == pytest.approx(1, abs=0.05)
    assert row["score_sd"] == pytest.approx(np.median(scores.std(1, correction=0)), rel=1e-4)
    assert row["share_frozen"] == 1
    assert row["regime"] in ("frozen", "sink-dominated")
    assert run.table("tails").query("head == 1")["survival"].notna().all()


def test_a_head_whose_values_are_zero(tmp_path: Path) -> None:
    """A pruned head: no limit and no error, so the first n is enough."""
    model, words = tiny_model("bert")
    value = model.encoder.layer[1].attention.self.value
    with torch.no_grad():
        value.weight[8:16] = 0
        value.bias[8:16] = 0
    run = es.probe(model, few_texts(), tokenizer=words, out=tmp_path, **SMALL)
    heads = run.table("heads").set_index("head")
    assert heads["rms_at_n"][1] == pytest.approx(0, abs=1e-12)
    assert heads["tokens_needed_10pct"][1] == run.table("curves")["n"].min()
    assert heads["status"][2] == "ok"


@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
def test_small_pools(folder: Path, tmp_path: Path, tokens: int) -> None:
    """Too little to say much, but no crash, and what is said is right."""
    run = es.probe(folder, few_texts(), out=tmp_path, **{**SMALL, "max_tokens": tokens, "n": None})
    heads = run.table("heads")
    assert (heads["n_keys"] == tokens).all()
    assert (heads["n_queries"] == min(tokens, 6)).all()
    if tokens > 1:
        assert (heads["rms_at_n"] > 0).all()


# ---- where a run is, and what is not done twice
# ------------------------------------------------------------------------


def test_a_run_has_a_place_of_its_own_and_is_found_again(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Progress] = []
    first = es.probe(folder, few_texts(), progress=seen.append, **SMALL)
    assert first.path.parent == Path("runs")
    assert first.path.name.startswith(f"{folder.name}-")
    assert f"run: {first.path}" in capsys.readouterr().err
    assert seen[-1].done == seen[-1].total
    stamp = (first.path / "heads.parquet").stat().st_mtime_ns
    again = es.probe(folder, few_texts(), **SMALL)
    assert again.path == first.path
    assert (again.path / "heads.parquet").stat().st_mtime_ns == stamp
    assert capsys.readouterr().err == ""  # nobody looks on here
    other = es.probe(folder, few_texts()[:4], **SMALL)
    assert other.path != first.path
    assert {entry.name for entry in Path("runs").iterdir()} == {
        first.path.name,
        other.path.name,
        ".texts",
    }
    assert [run.path.name for run in list_runs("runs")] == [first.path.name, other.path.name]


def test_nothing_is_left_in_the_temporary_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    es.probe(folder, few_texts(), **SMALL)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_settings_have_the_names_of_flags_and_take_any_sequence(
    folder: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"layers": range(2), "heads": np.array([1, 2]), "n": [16, 64]}
    one = es.probe(folder, few_texts(), out=tmp_path, **{**SMALL, **more}, epsilon=0.3, scale=[2.0])
    assert one.spec["layers"] == [0, 1]
    assert one.spec["heads"] == [1, 2]
    assert one.spec["epsilons"] == [0.1, 0.3]
    assert one.spec["scales"] == [2.0]
    assert "tokens_needed_30pct" in one.table("heads")


def test_a_probe_that_measured_nothing_says_so(tmp_path: Path) -> None:
    """In place of a table in which every head failed."""
    heads = [
        {"layer": 0, "head": head, "status": "failed", "reason": "no query sees 16 keys"}
        for head in range(3)
    ]
    run = store_run(tmp_path / "run", ProbeLike(), {"heads": heads})
    with pytest.raises(ValueError, match="none of 3 heads could be measured: no query sees 16"):
        check_measured(run)
    heads[1]["status"] = "ok"
    check_measured(store_run(tmp_path / "other", ProbeLike(), {"heads": heads}))
