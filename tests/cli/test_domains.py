"""Several domains in one command: a run for each, compared, gone on with, reported; mistakes are
one line.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

import esscher as es
from tests.cli.commands import run
from tests.models.probe_runs import few_texts, save_tiny

SMALL = {
    "max-tokens": 300,
    "window": 64,
    "queries": 6,
    "kept-queries": 2,
    "layers": 1,
    "n": "16,64,256",
}
QUICK = [
    *(part for name, value in SMALL.items() for part in (f"--{name}", str(value))),
    "--workers",
    "1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of two domains."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "one.txt").write_text("\n".join(few_texts()), encoding="utf-8")
    (folder / "other.txt").write_text("\n".join(reversed(few_texts())).upper(), encoding="utf-8")
    return ["--domain", f"one={folder / 'one.txt'}", "--domain", f"other={folder / 'other.txt'}"]


def test_domains_side_by_side(
    model: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "group"
    command = ["probe", str(model), *texts, "--out", str(out), *QUICK]
    code, shown, err = run(command, capsys)
    assert code == 0, err
    assert "domain ranks: one, other" in shown
    assert "rank correlation" in shown
    assert {path.name for path in out.iterdir() if not path.name.startswith(".")} == {
        *("one", "other", "group.json", "domains.parquet", "domain_ranks.parquet", "report.html")
    }
    medians = pd.read_parquet(out / "domains.parquet").set_index(["domain", "measure"])["median"]
    for name in ("one", "other"):
        alone = es.load_run(out / name)
        assert alone.table("heads")["beta_fit"].median() == pytest.approx(medians[name, "beta_fit"])
    page = (out / "report.html").read_text("utf-8")
    assert "domain_ranks" not in page
    assert "rank correlation" in page
    # one of them lost, the other kept: the same command, or resume, completes the group
    stamp = (out / "other" / "heads.parquet").stat().st_mtime_ns
    shutil.rmtree(out / "one")
    (out / "domains.parquet").unlink()
    code, shown, err = run(["resume", str(out), "--json"], capsys)
    assert code == 0, err
    found = json.loads(shown)
    assert list(found["runs"]) == ["one", "other"]
    assert {row["domain"] for row in found["domains"]} == {"one", "other"}
    assert (out / "other" / "heads.parquet").stat().st_mtime_ns == stamp
    assert (out / "domains.parquet").exists()
    code, shown, err = run(["report", str(out), "--json"], capsys)
    assert code == 0, err
    assert json.loads(shown)["page"] == str(out / "report.html")
    code, _, err = run(["budget", str(out)], capsys)
    assert code != 0
    assert "holds several runs" in err


def test_a_domain_is_the_probe_of_its_text(
    model: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            ["probe", str(model), *texts, "--out", str(tmp_path / "group"), "--no-report", *QUICK],
            capsys,
        )[0]
        == 0
    )
    text = texts[1].partition("=")[2]
    assert (
        run(
            [
                "probe",
                str(model),
                "--text",
                text,
                "--out",
                str(tmp_path / "run"),
                "--no-report",
                *QUICK,
            ],
            capsys,
        )[0]
        == 0
    )
    for table in ("heads", "curves", "layers"):
        pd.testing.assert_frame_equal(
            es.load_run(tmp_path / "group" / "one").table(table),
            es.load_run(tmp_path / "run").table(table),
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--packaged", "prose,poems"], "'prose', 'code' or 'legal', got 'poems'"),
        (["--packaged", "prose,prose"], "each domain once, got 'prose' twice"),
        (["--packaged", "prose,"], "letters, digits"),
        (["--domain", "a=b.txt"], "one domain alone"),
        (["--domain", "a", "--domain", "b"], "expected name=path, got 'a'"),
        (["--domain", "a=", "--domain", "b=x"], "expected name=path, got 'a='"),
        (["--domain", "../a=x", "--domain", "b=x"], "letters, digits"),
        (["--domain", "a=x", "--domain", "a=y"], "each domain once, got 'a' twice"),
        (["--domain", "a=x", "--domain", "b=y", "--text", "z"], "--text: one source of text"),
        (["--packaged", "prose,code", "--dataset", "z"], "--dataset: one source of text"),
        (["--domain", "a=/no/such/file", "--packaged", "prose"], "/no/such/file"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "group"
    code, shown, err = run(["probe", str(model), *arguments, "--out", str(out), *QUICK], capsys)
    assert (code, shown) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_pools_of_several_sizes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "sizes"
    text.write_text("\n".join(few_texts()), encoding="utf-8")
    quick = [flag for flag in QUICK if flag not in ("--max-tokens", str(SMALL["max-tokens"]))]
    command = ["probe", str(model), "--text", str(text), *quick, "--out", str(out)]
    code, shown, err = run([*command, "--pool-sizes", "512,256", "--json"], capsys)
    assert code == 0, err
    told = json.loads(shown)
    assert list(told["runs"]) == ["256", "512"]
    again = run([*command, "--pool-sizes", "512,256", "--json"], capsys)
    assert (again[0], json.loads(again[1])) == (0, told)  # the same command goes on with the group
    assert {row["larger"] for row in told["pool_sizes"]} == {512}
    for given, words in (
        ("256", "expected two or more numbers of tokens such as 16384,131072, got '256'"),
        ("256,many", "got '256,many'"),
        ("256,99999999", "fewer than 99999999; give more text or smaller sizes"),
    ):
        code, shown, err = run([*command, "--pool-sizes", given], capsys)
        assert (code, shown) == (2, "")
        assert err.splitlines()[-1].startswith("esscher: --pool-sizes: ")
        assert words in err
