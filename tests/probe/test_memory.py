"""Sessions of probes: one for each process of a run, and none left behind; how tokens meet queries,
decided once.
"""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import esscher as es
from esscher.hf.loading import wrap_model
from esscher.probe import job
from esscher.probe import session as probe_context
from esscher.probe.job import open_probe
from esscher.probe.session import Session, open_session
from esscher.probe.spec import ProbeSpec
from esscher.runs import executors
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


def test_a_run_opens_one_session_and_leaves_none_behind(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model and its tokens are not kept when the run is over."""
    opened: list[weakref.ref[Session]] = []
    make = probe_context.open_session

    def counted(*arguments: Any, **named: Any) -> Session:
        found = make(*arguments, **named)
        opened.append(weakref.ref(found))
        return found

    monkeypatch.setattr(job, "open_session", counted)
    es.probe(folder, text, out=tmp_path / "run", layers=(0,), max_tokens=300, window=64, queries=6)
    gc.collect()
    assert len(opened) == 1
    assert opened[0]() is None


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


def test_threads_of_a_worker_share_one_session(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each order of a run is opened once, and forgotten when the next one comes."""
    opened: list[str] = []

    def counted(order: str) -> Any:
        opened.append(order)
        return SimpleNamespace(shard=lambda index, unit: b"")

    monkeypatch.setattr(executors.Work, "open", counted)
    monkeypatch.setattr(executors, "_opened", {})
    for order in ("one", "two", "one"):
        arguments = (order, 0, {}, {})
        threads = [
            threading.Thread(target=executors.compute_remotely, args=arguments) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert opened == ["one", "two", "one"]


def test_an_object_is_asked_for_again(text: Path) -> None:
    """It has no name by which it could be loaded."""
    spec = spec_of(Path("object:0123"), text)
    assert open_probe(spec, wrap_model(*tiny_model("bert"))).keys == 300
    with pytest.raises(
        ValueError, match=r"given as a Python object, .* call esscher\.probe with that model"
    ):
        open_probe(spec)


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
