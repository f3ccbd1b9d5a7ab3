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
from esscher.probe.job import session_of
from esscher.probe.session import Session, open_session
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
    first = session_of(spec)
    assert session_of(spec_of(folder, text)) is first
    assert session_of(spec, starts=True) is first
    known = weakref.ref(first)
    del first
    assert session_of(spec_of(folder, text, seed=1)).spec.seed == 1
    gc.collect()
    assert known() is None  # a model and its tokens are not kept beside another


@pytest.mark.parametrize("what", ["text", "model"])
def test_changed_files_are_seen_when_a_run_starts(what: str, text: Path, tmp_path: Path) -> None:
    """And not before: the units of one run work on one text."""
    folder = save_tiny(tmp_path / "model")
    spec = spec_of(folder, text)
    first = session_of(spec)
    if what == "text":
        text.write_text("\n".join(few_texts()[6:12]), encoding="utf-8")
    else:
        save_tiny(folder, initializer_range=0.5)
    assert session_of(spec) is first
    second = session_of(spec, starts=True)
    one, two = ((c.loaded.sha256, c.windows.sha256) for c in (first, second))
    assert [a == b for a, b in zip(one, two, strict=True)] == [what == "text", what == "model"]
    assert session_of(spec, starts=True) is second


def test_what_a_run_writes_beside_text_and_model_is_no_change(tmp_path: Path) -> None:
    """Who stands in the folder of the model or of the text has the run below it."""
    folder = save_tiny(tmp_path / "model")
    (folder / "prose.txt").write_text("\n".join(few_texts()[:5]), encoding="utf-8")
    spec = spec_of(folder, folder)
    first = session_of(spec)
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "heads.parquet").write_bytes(b"")
    assert session_of(spec, starts=True) is first


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
    found: list[Session] = []
    threads = [threading.Thread(target=lambda: found.append(session_of(spec))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


def test_an_object_is_asked_for_again(text: Path) -> None:
    """It has no name by which it could be loaded, and another probe takes its place."""
    spec = spec_of(Path("object:0123"), text)
    given = session_of(spec, loaded=wrap_model(*tiny_model("bert")))
    assert session_of(spec, starts=True) is given
    session_of(spec.model_copy(update={"model": "packaged"}), loaded=given.loaded)
    with pytest.raises(
        ValueError, match=r"given as a Python object, .* call esscher\.probe with that model"
    ):
        session_of(spec)


@pytest.mark.parametrize(
    ("fields", "memory", "units"),
    [
        ({}, 1e9, [{"layers": [0], "part": 0, "heads": [0, 1, 2, 3]}]),
        ({"heads": (0, 2)}, 1e3, [{"layers": [0], "part": 0, "heads": [0, 2]}]),
        ({"part": 200}, 1e9, [{"layers": [0, 1], "part": part} for part in (0, 1)]),
        (
            {"part": 200},
            1e3,
            [{"layers": [layer], "part": part} for layer in (0, 1) for part in (0, 1)],
        ),
        ({"pool": "sequence"}, 1e9, [{"window": 0}]),
        ({"pool": "sequence", "part": 100}, 1e3, [{"window": 0}]),
    ],
)
def test_units_of_work(
    text: Path,
    fields: dict[str, Any],
    memory: float,
    units: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window each, layers that fit into memory over a part each, or a few heads of one part."""
    monkeypatch.setattr(probe_context, "MEMORY", memory)
    found = open_session(spec_of(Path("tiny"), text, **fields), wrap_model(*tiny_model("bert")))
    assert found.units[: len(units)] == units
    assert found.own == ("pool" in fields)
    assert (len(found.parts) > 1) == ("part" in fields)


def test_memory_is_counted_in_what_is_held(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the layers that are asked for, 4 bytes a number."""
    loaded = wrap_model(*tiny_model("bert"))
    shape = loaded.shapes[0]
    keys = open_session(spec_of(Path("tiny"), text), loaded).keys
    size = 4 * keys * shape.heads * shape.width * 4
    for memory, blocks in ((size, [[0, 1]]), (size - 1, [[0], [1]])):
        monkeypatch.setattr(probe_context, "MEMORY", memory)
        assert open_session(spec_of(Path("tiny"), text), loaded).blocks == blocks


def test_once(text: Path) -> None:
    found = open_session(spec_of(Path("tiny"), text), wrap_model(*tiny_model("bert")))
    calls: list[Any] = []

    def make(context: Session, *arguments: int) -> int:
        calls.append(arguments)
        return context.keys + sum(arguments)

    assert [found.once(make, 1), found.once(make, 1), found.once(make, 2), found.once(make, 1)] == [
        301,
        301,
        302,
        301,
    ]
    assert calls == [(1,), (2,), (1,)]
