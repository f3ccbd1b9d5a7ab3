"""What the page is given: numbers rounded once, words that say what the row says, every column
explained.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from esscher import report
from esscher.report import render_page, write_report
from esscher.report.page import content_of
from esscher.report.words import (
    columns_of,
    need_column,
    number,
    ranked_heads,
    shortened,
    text_described,
    written,
)
from esscher.runs import Run, load_run
from esscher.runs.columns import declare
from tests.report.atlas import ProbeLike, atlas_run, atlas_tables, declared, store_run


@pytest.mark.parametrize(
    ("value", "packed"),
    [
        (0.123456789, 0.12346),
        (16384.0, 16384),
        (math.nan, None),
        (-math.inf, None),
        (1e300, 1e300),
        (0.0, 0),
    ],
)
def test_numbers_keep_five_digits(value: float, packed: float | None) -> None:
    assert number(value) == packed


def test_cells_that_are_not_numbers_become_text() -> None:
    frame = pd.DataFrame({"a": [1.5, math.nan], "b": ["x", None], "c": [True, False]})
    assert columns_of(frame) == {"a": [1.5, None], "b": ["x", ""], "c": ["True", "False"]}


def test_long_text_is_shortened_with_its_length() -> None:
    short = shortened("a" * 9_000 + "b" * 1_000)
    assert short.startswith("aaa")
    assert short.endswith("b (10,000 characters)")
    assert len(short) < 300
    assert shortened("brief") == "brief"


def test_every_stored_column_is_explained(atlas: Run) -> None:
    for table in atlas.tables:
        for key, column in atlas.columns(table).items():
            assert "stored table" not in column.help, key
    shown = {column["key"]: column for column in content_of(atlas)["columns"]}
    assert list(shown)[:4] == ["layer", "head", "status", "tokens_needed_5pct"]
    assert shown["tokens_needed_5pct"]["label"] == "tokens for 5 %"


def test_a_page_of_a_run_that_says_nothing_of_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of an earlier esscher: columns are shown under their own names, in their own order."""
    monkeypatch.setattr("tests.report.atlas.declared", lambda spec: {})
    content = content_of(atlas_run(tmp_path / "old", 2, 2))
    assert [column["key"] for column in content["columns"]] == list(content["rows"])
    assert content["columns"][2] == {
        "key": "kv_head", "kind": "int", "label": "kv head", "help": "Column kv_head of the stored table."  # noqa: E501
    }  # fmt: skip


def heads() -> pd.DataFrame:
    """Head 2 never came down and erred most, head 3 never came down, head 0 needs least."""
    return pd.DataFrame(
        {
            "layer": 0,
            "head": [0, 1, 2, 3, 4],
            "status": ["ok", "ok", "ok", "ok", "failed"],
            "tokens_needed_10pct": [50.0, 900.0, math.nan, math.nan, math.nan],
            "relative_at_n": [0.01, 0.1, 0.9, 0.4, math.nan],
            "n_keys": 1000,
            "beta_fit": [0.5, 0.3, 0.05, 0.1, math.nan],
            "regime": ["diffuse", "selective", "frozen", "frozen", ""],
        }
    )


def test_the_most_demanding_heads() -> None:
    assert ranked_heads(heads(), "tokens_needed_10pct")["head"].tolist() == [0, 1, 3, 2]
    assert ranked_heads(heads(), "tokens_needed_1pct").empty


def test_heads_are_ordered_by_what_a_keep_rule_needs() -> None:
    """Draws with replacement say the contrary: two keys decide head 1, the easiest for a rule and
    the worst for draws.
    """
    known = heads().assign(cache_kept_10pct=[120.0, 2.0, math.nan, math.nan, math.nan])
    assert need_column(known, "10") == "cache_kept_10pct"
    assert need_column(known, "5") == "tokens_needed_5pct"
    assert ranked_heads(known, need_column(known, "10"))["head"].tolist() == [1, 0, 3, 2]


def test_no_estimate_of_a_number_with_a_bound_at_best(tmp_path: Path) -> None:
    """Whatever the statuses are called: of the last no estimate is to be trusted."""
    tables = atlas_tables(1, 2)
    row = {"number": "beta_fit", "value": 0.5, "half": 0.4, "estimate": 0.7, "low": 0.1}
    statuses = ("not converged", "beyond the text")
    tables["endless"] = [
        row | {"layer": 0, "head": head, "high": math.nan, "status": status}
        for head, status in enumerate(statuses)
    ]
    content = content_of(store_run(tmp_path / "run", ProbeLike(), tables))
    assert [part["status"] for (part,) in content["endless"]] == list(statuses)
    assert "high" not in content["endless"][0][0]
    assert content["bounded"] == ("beyond the text",)


def test_no_status_stands_in_the_report() -> None:
    """The words of statuses are the column's alone."""
    folder = Path(report.__file__).parent
    sources = [
        path.read_text("utf-8") for path in folder.rglob("*") if path.suffix in (".py", ".js")
    ]
    assert not [
        word
        for word in ("not converged", "beyond the text")
        for text in sources
        if f'"{word}"' in text
    ]


def test_written_numbers() -> None:
    assert [written(value) for value in (16384, 0.0432, 1234.5, 3.1e9)] == [
        "16,384",
        "0.0432",
        "1,234",
        "3.1e+09",
    ]


@pytest.mark.parametrize(
    ("corpus", "text"),
    [
        ({"text": ["a.txt"]}, "a.txt"),
        ({"text": ["a", "b", "c", "d", "e"]}, "a, b, c and 2 more"),
        ({"text": [], "dataset": "wikitext", "split": "test"}, "wikitext"),
        ({"text": [], "packaged": "prose"}, "packaged prose"),
    ],
)
def test_the_text_in_words(corpus: dict[str, object], text: str) -> None:
    assert text_described({"corpus": corpus}) == text


def test_first_line_from_what_was_measured(tmp_path: Path) -> None:
    tables = {
        "heads": [
            {"layer": 0, "head": 0, "status": "ok", "reason": "", "n_keys": 100, "n_queries": 7}
        ],
        "about": [{"model": "known-model", "tokens": 4000, "window": 512}],
    }
    content = content_of(store_run(tmp_path / "run", ProbeLike(), tables))
    assert content["lines"][0] == (
        "model: known-model; text: prose.txt; tokens: 4,000 in windows of 512; heads: 1 of"
        " 1, 1 layer; keys a query sees: 100; queries per head: 7"
    )


def test_first_line_says_that_keys_are_a_mean_over_depths(tmp_path: Path) -> None:
    head = {"layer": 0, "head": 0, "status": "ok", "reason": "", "n_keys": 1272, "n_queries": 7}
    tables = {
        "heads": [head | {"n_keys_least": 497, "n_keys_most": 2048}],
        "about": [{"model": "known-model", "pool": "sequence"}],
    }
    content = content_of(store_run(tmp_path / "run", ProbeLike(), tables))
    told = "1,272 (a query's own window, mean over positions, 497 to 2,048)"
    assert f"keys a query sees: {told}; queries per head: 7" in content["lines"][0]
    tables["heads"] = [head | {"n_keys_least": 1272, "n_keys_most": 1272}]
    content = content_of(store_run(tmp_path / "same", ProbeLike(), tables))
    assert "keys a query sees: 1,272 (a query's own window); " in content["lines"][0]


def test_the_same_run_gives_the_same_page(atlas: Run) -> None:
    assert render_page([atlas]) == render_page([load_run(atlas.path)])


def test_reading_and_drawing_need_no_torch(atlas: Run, tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
from esscher.report import write_report
from esscher.runs import load_run
from matplotlib.figure import Figure
write_report([sys.argv[1]], sys.argv[2])
load_run(sys.argv[1]).plot_map(ax=Figure().subplots())
"""
    out = tmp_path / "new" / "page.html"
    subprocess.run([sys.executable, "-c", code, str(atlas.path), str(out)], check=True)
    assert out.read_text("utf-8") == render_page([atlas])
    assert list(out.parent.iterdir()) == [out]


def test_bad_places(atlas: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs: expected at least one run"):
        write_report([])
    with pytest.raises(
        ValueError, match=r"out: expected a file name such as report\.html, got the folder"
    ):
        write_report([atlas], tmp_path)


def test_partial_tables_of_an_unfinished_run(tmp_path: Path) -> None:
    """A run without final tables is read from its shards."""
    from esscher.runs.store import Store, write_durable
    from esscher.runs.tables import as_tables, encode_shard

    run = store_run(tmp_path / "run", ProbeLike(), {}, status="running", units=3)
    curve = {"layer": 1, "head": 0, "metric": "l2", "kind": "exact", "n": 10, "rms": 0.1}
    row = {"layer": 1, "head": 0, "status": "ok", "reason": "", "beta_fit": 0.4}
    tables = declare(as_tables({"heads": [row], "curves": [curve]}), declared(ProbeLike()))
    header = {**run.manifest.header, "index": 1, "unit": {"unit": 1}}
    write_durable(Store(run.path).shard_path(1), encode_shard(tables, header))
    content = content_of(load_run(run.path))
    assert content["rows"]["layer"] == [1]
    assert content["errors"]["l2"] == "exact, keys drawn with replacement"
    assert "This run is incomplete: 1 of 3 units are done." in content["warnings"]


def test_summary_says_of_how_many_layers(tmp_path: Path) -> None:
    tables = atlas_tables(3, 4) | {
        "about": pd.DataFrame([{"model": "some", "layers": 30, "heads": 4}])
    }
    run = store_run(tmp_path / "run", ProbeLike(), tables)
    assert "(12 of 120 heads)" in run.summary()


def test_summary_of_a_run(atlas: Run, tmp_path: Path) -> None:
    text = atlas._repr_html_()
    assert " heads)" not in text  # all were measured
    assert "for an error of 10 % L4H0 needs most (" in text
    broken = atlas_run(tmp_path / "broken", 1, 1)
    (broken.path / "heads.parquet").write_bytes(b"no")
    assert "damaged" in load_run(broken.path)._repr_html_()
