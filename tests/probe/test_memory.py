"""What a process remembers of probes: one context, as long as spec and files stay; how tokens meet
queries, decided once.
"""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import esscher as es
from esscher.corpus.documents import files_of_text
from esscher.corpus.spec import CorpusSpec
from esscher.hf.checkpoint import files_of_model
from esscher.hf.loading import wrap_model
from esscher.probe import session as probe_context
from esscher.probe.checks import context_of
from esscher.probe.session import Mode, ProbeContext, make_context
from esscher.probe.spec import ProbeSpec
from tests.cli.commands import run
from tests.models.probe_runs import few_texts, save_tiny, tiny_model


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text("\n".join(few_texts()[:5]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def spec_of(folder: Path, text: Path, **fields: Any) -> ProbeSpec:
    corpus = {"text": [str(text)], "max_tokens": 300}
    return ProbeSpec.read(
        {
            "model": str(folder),
            "corpus": corpus,
            "window": 64,
            "queries": 6,
            "kept_queries": 2,
            **fields,
        }
    )


def test_one_context_while_the_spec_stays(folder: Path, text: Path) -> None:
    spec = spec_of(folder, text)
    first = context_of(spec)
    assert context_of(spec_of(folder, text)) is first
    assert context_of(spec, starts=True) is first
    known = weakref.ref(first)
    del first
    assert context_of(spec_of(folder, text, seed=1)).spec.seed == 1
    gc.collect()
    assert known() is None  # a model and its tokens are not kept beside another


@pytest.mark.parametrize("what", ["text", "model"])
def test_changed_files_are_seen_when_a_run_starts(what: str, text: Path, tmp_path: Path) -> None:
    """And not before: the units of one run work on one text."""
    folder = save_tiny(tmp_path / "model")
    spec = spec_of(folder, text)
    first = context_of(spec)
    if what == "text":
        text.write_text("\n".join(few_texts()[6:12]), encoding="utf-8")
    else:
        save_tiny(folder, initializer_range=0.5)
    assert context_of(spec) is first
    second = context_of(spec, starts=True)
    one, two = ((c.loaded.sha256, c.windows.sha256) for c in (first, second))
    assert [a == b for a, b in zip(one, two, strict=True)] == [what == "text", what == "model"]
    assert context_of(spec, starts=True) is second


def test_what_a_run_writes_beside_text_and_model_is_no_change(tmp_path: Path) -> None:
    """Who stands in the folder of the model or of the text has the run below it."""
    folder = save_tiny(tmp_path / "model")
    (folder / "prose.txt").write_text("\n".join(few_texts()[:5]), encoding="utf-8")
    spec = spec_of(folder, folder)
    first = context_of(spec)
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "heads.parquet").write_bytes(b"")
    assert context_of(spec, starts=True) is first


def test_names_of_no_file_here() -> None:
    """What is wrong with them is said by who reads them."""
    for name in ("no-such/model", "not a name!", "a--b/c..d"):
        assert files_of_model(name) == []
    for fields in ({"dataset": "no-such/dataset"}, {"packaged": "code"}, {"text": ["-"]}):
        assert files_of_text(CorpusSpec.model_validate(fields)) == []
    assert files_of_text(CorpusSpec(text=("nowhere.txt",))) == [Path("nowhere.txt")]


def test_two_commands_in_a_process_read_a_text_that_changed(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        str(folder),
        "--text",
        str(text),
        "--no-report",
        "--workers",
        "1",
        "--layers",
        "0",
        "--heads",
        "0",
        "--window",
        "64",
    ]
    for name in ("one", "two"):
        assert (
            run(
                [
                    "probe",
                    *line,
                    "--queries",
                    "4",
                    "--max-tokens",
                    "200",
                    "--out",
                    str(tmp_path / name),
                ],
                capsys,
            )[0]
            == 0
        )
        text.write_text("\n".join(few_texts()[6:12]), encoding="utf-8")
    one, two = (es.load_run(tmp_path / name).manifest.hashes["corpus"] for name in ("one", "two"))
    assert one != two


def test_threads_share_one_context(folder: Path, text: Path) -> None:
    spec = spec_of(folder, text, seed=7)
    found: list[ProbeContext] = []
    threads = [threading.Thread(target=lambda: found.append(context_of(spec))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


def test_an_object_is_asked_for_again(text: Path) -> None:
    """It has no name by which it could be loaded, and another probe takes its place."""
    spec = spec_of(Path("object:0123"), text)
    given = context_of(spec, loaded=wrap_model(*tiny_model("bert")))
    assert context_of(spec, starts=True) is given
    context_of(spec.model_copy(update={"model": "packaged"}), loaded=given.loaded)
    with pytest.raises(
        ValueError, match=r"given as a Python object, .* call esscher\.probe with that model"
    ):
        context_of(spec)


@pytest.mark.parametrize(
    ("fields", "memory", "mode"),
    [
        ({}, 1e9, Mode.HELD),
        ({"moments": 2}, 1e9, Mode.HELD),
        ({}, 1e3, Mode.LAYERS),
        ({"part": 100}, 1e9, Mode.PARTS),
        ({"part": 100}, 1e3, Mode.PARTS),
        ({"pool": "sequence"}, 1e9, Mode.OWN),
        ({"pool": "sequence", "part": 100}, 1e3, Mode.OWN),
    ],
)
def test_how_tokens_meet_queries(
    text: Path, fields: dict[str, Any], memory: float, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_context, "MEMORY", memory)
    found = make_context(spec_of(Path("tiny"), text, **fields), wrap_model(*tiny_model("bert")))
    assert found.mode is mode
    assert (len(found.parts) > 1) == ("part" in fields)


def test_memory_is_counted_in_what_is_held(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values, and with moments queries too, of the layers that are asked for, 4 bytes a
    number.
    """
    loaded = wrap_model(*tiny_model("bert"))
    shape = loaded.shapes[0]
    keys = make_context(spec_of(Path("tiny"), text), loaded).keys
    for layers, moments, kinds in (((0,), 0, 2), ((0, 1), 0, 4), ((1,), 2, 3)):
        size = 4 * keys * shape.heads * shape.width * kinds
        for memory, mode in ((size, Mode.HELD), (size - 1, Mode.LAYERS)):
            monkeypatch.setattr(probe_context, "MEMORY", memory)
            assert (
                make_context(
                    spec_of(Path("tiny"), text, layers=layers, moments=moments), loaded
                ).mode
                is mode
            )


def test_once(text: Path) -> None:
    found = make_context(spec_of(Path("tiny"), text), wrap_model(*tiny_model("bert")))
    calls: list[Any] = []

    def make(context: ProbeContext, *arguments: int) -> int:
        calls.append(arguments)
        return context.keys + sum(arguments)

    assert [found.once(make, 1), found.once(make, 1), found.once(make, 2), found.once(make, 1)] == [
        301,
        301,
        302,
        301,
    ]
    assert calls == [(1,), (2,), (1,)]
