"""Runs of one model on several texts, or on one text in several sizes, compared; mistakes are one
line.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import esscher as es
from tests.cli.commands import run
from tests.models.probe_runs import few_texts, save_tiny

QUICK = "--window 64 --queries 6 --kept-queries 2 --layers 1 --n 16,64,256 --workers 1 --no-report"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs one and other on two texts, and larger of the first in a larger pool."""
    folder = tmp_path_factory.mktemp("compared")
    model = save_tiny(folder / "tiny-bert")
    (folder / "one.txt").write_text("\n".join(few_texts()), encoding="utf-8")
    (folder / "other.txt").write_text("\n".join(reversed(few_texts())).upper(), encoding="utf-8")
    for name, text, tokens in (
        ("one", "one", 256),
        ("other", "other", 256),
        ("larger", "one", 512),
    ):
        text_path, out = folder / f"{text}.txt", folder / name
        asked = ["--text", str(text_path), "--out", str(out), "--max-tokens", str(tokens)]
        with pytest.raises(SystemExit) as stop:
            es.cli.main(["probe", str(model), *asked, *QUICK.split()])
        assert not stop.value.code
    return folder


def test_two_texts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both, page = [str(folder / "one"), str(folder / "other")], tmp_path / "both.html"
    code, shown, err = run(["compare", *both, "--out", str(page)], capsys)
    assert code == 0, err
    assert "domain ranks: one, other" in shown
    assert "rank correlation" in shown
    assert "rank correlation" in page.read_text("utf-8")
    code, shown, err = run(["compare", *both, "--json"], capsys)
    assert code == 0, err
    told = json.loads(shown)
    assert set(told) == {"page", "domain_ranks", "domains"}
    medians = {(row["domain"], row["measure"]): row["median"] for row in told["domains"]}
    for name in ("one", "other"):
        alone = es.load_run(folder / name).table("heads")["beta_fit"].median()
        assert alone == pytest.approx(medians[name, "beta_fit"])


def test_pools_of_several_sizes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(folder / name) for name in ("larger", "one")]
    code, shown, err = run(["compare", *runs, "--json"], capsys)
    assert code == 0, err
    told = json.loads(shown)
    sizes = sorted(int(es.load_run(path).table("about")["tokens"].iloc[0]) for path in runs)
    assert {(row["pool"], row["larger"]) for row in told["pool_sizes"]} == {tuple(sizes)}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["one"], "runs: expected two or more"),
        (["one", "one"], "in folders of different names, got one, one"),
        (["one", "nowhere"], "no such run directory"),
    ],
)
def test_mistakes_are_one_line(
    names: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, err = run(["compare", *(str(folder / name) for name in names)], capsys)
    assert (code, shown) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_other_models_and_other_jobs_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    law = "job: converge\nlaw: {law: gaussian, dim: 2}\nn: 20,60\nrepeats: 4\nqueries: 4\n"
    (tmp_path / "law.yaml").write_text(law)
    asked = [str(tmp_path / "law.yaml"), "--out", str(tmp_path / "law"), "--figures", ""]
    assert run(["converge", *asked], capsys)[0] == 0
    manifest = json.loads((folder / "other" / "manifest.json").read_text())
    manifest["hashes"]["model"] = "of other weights"
    (tmp_path / "else").mkdir()
    for file in (folder / "other").glob("*.parquet"):
        (tmp_path / "else" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "else" / "manifest.json").write_text(json.dumps(manifest))
    for name, said in (("law", "expected a finished run of esscher probe"), ("else", "its model")):
        code, _, err = run(["compare", str(folder / "one"), str(tmp_path / name)], capsys)
        assert code == 2
        assert said in err
