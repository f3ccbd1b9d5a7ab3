"""``esscher probe``: what it prints and stores, and one line with exit code 2 for whatever a user
got wrong.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import esscher as es
from esscher.cli import main
from esscher.hf import load_model
from esscher.report.words import USUAL
from tests.cli.commands import run
from tests.models.probe_runs import few_texts, save_tiny, source
from tests.models.tiny import REFUSED, build
from tests.models.tokenizers_for_tests import tokenizer
from tests.real_head import model_folder

SMALL = {
    "max-tokens": 300,
    "window": 64,
    "queries": 6,
    "kept-queries": 2,
    "layers": 1,
    "heads": "1-2",
    "n": "16,64,256",
}
QUICK = [
    *(part for name, value in SMALL.items() for part in (f"--{name}", str(value))),
    "--workers",
    "1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("\n".join(few_texts()), encoding="utf-8")
    return path


def test_table_report_and_run(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code, shown, err = run(
        ["probe", str(folder), "--text", str(text), "--out", str(out), *QUICK], capsys
    )
    assert code == 0
    assert "check: outputs of attention match the model's to " in err
    assert "first look, 256 tokens, all layers: the median head attends to " in err
    assert len(shown.splitlines()) <= 12
    following = next(line for line in shown.splitlines() if line.startswith("Next: "))
    assert following.startswith(f"Next: esscher probe {folder} --pool sequence --text {text} --")
    code, again, _ = run([*following.split(" ")[2:], "--dry-run", "--json"], capsys)
    assert code == 0
    assert (json.loads(again)["cost"]["queries"], json.loads(again)["cost"]["tokens"]) == (6, 300)
    assert "1 layer, 6 queries over 300 keys of the corpus" in err
    assert {"manifest.json", "heads.parquet", "curves.parquet", "report.html"} <= {
        path.name for path in out.iterdir()
    }
    assert list(es.load_run(out).table("heads")["head"]) == [1, 2]
    # the same again is the same run; as JSON it has the tables
    code, shown, _ = run(
        [
            "probe",
            str(folder),
            "--text",
            str(text),
            "--out",
            str(out),
            "--no-report",
            "--json",
            *QUICK,
        ],
        capsys,
    )
    assert code == 0
    found = json.loads(shown)
    assert [row["head"] for row in found["heads"]] == [1, 2]
    assert found["run"] == str(out)
    assert found["report"] is None
    assert {"about", "heads", "layers", "spec"} <= set(found)


@pytest.fixture(scope="module")
def own_contexts(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A probe of one of two layers of a causal model, every query in its own context; and its
    command.
    """
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")
    out = tmp_path_factory.mktemp("runs") / "own"
    command = (
        f"probe {folder} --text {text} --pool sequence --layers 1 --max-tokens 96 --window 48"
        " --queries 4 --kept-queries 2"
    )
    command += (
        " --rules random --rules heavy --rules neyman --epsilon 0.3 --workers 1 --no-report --out"
        f" {out}"
    )
    with pytest.raises(SystemExit, match=r"^0$"):
        main(command.split(" "))
    return out, command.split(" ")


def test_own_contexts_say_what_a_rule_keeps(
    own_contexts: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rules by the share of the cache they need, the heads that need most and least, and the
    command for the best rule, in 12 lines.
    """
    out, command = own_contexts
    heads = es.load_run(out).table("heads")
    assert len(heads) == 4
    code, shown, err = run(command, capsys)
    assert code == 0
    assert "check: outputs of attention match the model's to " in err
    lines = shown.splitlines()
    assert len(lines) <= 12
    assert "(4 of 8 heads): " in lines[0]
    assert " of the cache for a loss of 0.05 nats per token (predicted loss " in lines[0]
    assert ", if heads may keep different numbers of keys; " in lines[0]
    rules = [line.split()[0] for line in lines if "cache  " in line or "all keys" in line]
    assert rules[-1] == "neyman"  # a bound, and no rule that one could run
    assert f": {rules[1]} keeps " in lines[0]
    window = "--window 42 --decode 6"
    asked = f"--layers 1 {window} --kl 0.05 --rules {rules[1]} --rules fisher+refit"
    assert lines[-1] == f"Next: esscher compress {command[1]} --text {command[3]} {asked}"
    keys = es.load_run(out).table("frontier")["keys"].max()
    assert (heads["cache_kept_10pct"].dropna() <= keys).all()
    assert lines[0] in es.load_run(out).summary()
    assert "<table" in es.load_run(out)._repr_html_()
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run(command, capsys)[1].splitlines()
    assert max(map(len, narrow[:-1])) <= 80, narrow  # a command to copy is not folded
    assert len(narrow) <= 12
    assert any("any cache" in line for line in narrow[1:])


def test_the_command_that_a_probe_ends_with_works(
    own_contexts: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As printed, with numbers that the tiny model takes."""
    following = run(own_contexts[1], capsys)[1].splitlines()[-1]
    _, _, *asked = following.split(" ")
    small = "--texts 1 --observe 8 --sinks 2 --recent 4 --no-report"
    code, shown, _ = run([*asked, *small.split(" "), "--out", str(tmp_path / "run")], capsys)
    assert code == 0
    rules = set(es.load_run(tmp_path / "run").table("compress")["rule"])
    assert rules == {"full", "fisher+refit", asked[asked.index("--rules") + 1]}
    about = es.load_run(tmp_path / "run").table("about").iloc[0]
    assert (about["window"], about["decode"]) == (42, 6)  # a window of the probe
    assert es.load_run(tmp_path / "run").table("compress")["kl"].iloc[1:].notna().all()
    whole = shown.splitlines()[-1]  # every layer
    start = f"Next: esscher compress {asked[1]} --text {asked[3]} --window 42 --decode 6 --sinks 2"
    assert re.fullmatch(rf"{start} --recent 4 --observe 8 --kl 0\.05 --rules \S+", whole)
    more = ["--texts", "1", "--no-report", "--out", str(tmp_path / "whole")]
    code, shown, _ = run([*whole.split(" ")[2:], *more], capsys)
    assert code == 0
    call = shown.splitlines()[-1].removeprefix("Next: ")
    model = load_model(asked[1], with_head=True).model
    model.generation_config.max_new_tokens = 2
    ids = 1 + torch.arange(60)[None] % 39
    names = {"es": es, "model": model, "ids": ids}
    exec(call, names)
    made = names["cache"].compression
    assert made.keys_full == 42 * 2 * 2  # as many tokens, in two layers of two key-value heads
    usual = inspect.signature(es.compress).parameters
    assert {name: usual[name].default for name in USUAL} == USUAL


def test_all_prints_every_table_whole(
    own_contexts: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = es.load_run(own_contexts[0])
    code, shown, _ = run([*own_contexts[1], "--all"], capsys)
    assert code == 0
    lines = shown.splitlines()
    start = lines.index(f"heads: {stored.path}")
    rows = [line.split()[:2] for line in lines[start + 2 : start + 6]]
    assert rows == [["1", str(head)] for head in stored.table("heads")["head"]]
    start = lines.index(f"budget: {stored.path}")
    end = lines.index(f"layers: {stored.path}")
    assert end - start == 2 + len(stored.table("budget"))


def test_predicted_beside_measured(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With moments, measured exponents, both forms of [B] and their rank correlations."""
    (tmp_path / "more.yaml").write_text("moments_n: 8,20,50\n")
    given = [
        *("probe", str(folder), "--text", str(text), *QUICK, "--heads", "0-3", "--layers", "0-1"),
        *("--no-report", "--all", "--moments", "3", "--config", str(tmp_path / "more.yaml")),
    ]
    moments = ["--out", str(tmp_path / "moments")]
    code, shown, _ = run([*given, *moments], capsys)
    assert code == 0
    for word in ("mean", "covariance", "[B] proved", "[B] experimental"):
        assert word in shown, word
    row = es.load_run(tmp_path / "moments").table("heads").iloc[5]
    assert f"{row['beta_cov']:.3g} [" in shown


def test_runs_have_a_name_of_their_own(
    folder: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder.parent)
    code, shown, _ = run(
        ["probe", folder.name, "--text", str(text), "--no-report", "--json", *QUICK], capsys
    )
    assert code == 0
    path = Path(json.loads(shown)["run"])
    assert path.parent == Path("runs")
    assert path.name.startswith("tiny-bert-")
    path = path.absolute()
    assert es.load_run(path).status == "complete"
    shutil.rmtree(path / "shards")
    monkeypatch.chdir(tmp_path)  # the model was named from where the run began
    code, shown, err = run(["resume", str(path)], capsys)
    assert code == 0
    # it ends as the probe does: with its table and its page
    assert " (2 of 8 heads): for an error of 10 % L1H2 needs most (" in shown
    assert f"report: {path / 'report.html'}" in err
    assert (path / "report.html").exists()


def test_flags_go_before_a_file_and_defaults_behind_it(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "model": str(folder),
        "corpus": {"text": [str(text)], "max_tokens": 200},
        **{
            "window": 64,
            "queries": 6,
            "kept_queries": 2,
            "layers": [1],
            "heads": [3],
            "n": "16,64",
            "seed": 5,
        },
    }
    path = tmp_path / "probe.yaml"
    path.write_text(yaml.safe_dump(settings))
    found = tmp_path / "one"
    assert (
        run(
            ["probe", "--config", str(path), "--out", str(found), "--no-report", "--workers", "1"],
            capsys,
        )[0]
        == 0
    )
    spec = source(es.load_run(found)).spec
    assert (spec.seed, spec.corpus.max_tokens, spec.heads, spec.queries) == (5, 200, (3,), 6)
    other = tmp_path / "two"
    flags = ["--seed", "7", "--max-tokens", "150", "--heads", "0"]
    assert (
        run(
            [
                "probe",
                "--config",
                str(path),
                "--out",
                str(other),
                "--no-report",
                "--workers",
                "1",
                *flags,
            ],
            capsys,
        )[0]
        == 0
    )
    spec = source(es.load_run(other)).spec
    assert (spec.seed, spec.corpus.max_tokens, spec.heads, spec.queries) == (7, 150, (0,), 6)


def test_what_the_pool_leaves_out_is_said(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once for all heads that it is true of; the limit of a corpus has no room for a logit without
    a key.
    """
    model = save_tiny(tmp_path / "model", "gpt_oss")
    capsys.readouterr()
    flags = [
        "--text",
        str(text),
        "--pool",
        "corpus",
        "--no-report",
        "--out",
        str(tmp_path / "run"),
        *QUICK,
    ]
    code, _, err = run(["probe", str(model), *flags], capsys)
    assert code == 0
    assert err.count("2 of 2 heads: left out of the pool: sink logit") == 1


# ---- bad input
# ------------------------------------------------------------------------------------------


def refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], *, weights: bool = False
) -> str:
    """The one line on stderr. A mistake in weights comes after the line that they are read."""
    code, out, err = run(["probe", *arguments], capsys)
    assert (code, out) == (2, "")
    *progress, line = err.strip().splitlines()
    assert [one.rpartition("; ")[2] for one in progress] == ["reading the weights"] * weights, err
    assert line.startswith("esscher: ")
    return line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--layers 2", "has layers 0 to 1, got 2"),
        ("--heads 4", "has heads 0 to 3, got 4"),
        ("--layers 1-", "--layers: expected numbers such as 0,2-4, below 10000000, got '1-'"),
        ("--layers one", "--layers: expected numbers such as 0,2-4"),
        ("--layers -1", "--layers: expected numbers such as 0,2-4"),
        ("--layers 3-1", "--layers"),
        ("--heads ,", "--heads: expected numbers such as 0,2-4"),
        (
            "--n 16,301",
            "the pool has 300 keys, got n = 301; give more text (--max-tokens) or smaller n",
        ),
        ("--n 0,5", "n"),
        ("--window 65", "at most 64 positions, got 65; use --window 64"),
        ("--window 1", "take longer windows"),
        ("--pool everything", "pool: input should be 'auto', 'corpus' or 'sequence'"),
        ("--epsilon 1.5", "between 0 and 1"),
        ("--epsilon 0", "between 0 and 1"),
        ("--max-tokens -1", "max_tokens: input should be greater than"),
        ("--queries 0", "queries"),
        ("--pool sequence --rules tpk", "rules: keep: no rule 'tpk'; did you mean topk? "),
        ("--pool sequence --rules topk --rules window:0+recent", "got 0; esscher rules"),
        (
            "--pool sequence --rules random:2+recent",
            "expected a number above 0 and up to 1, got 2; esscher rules",
        ),
        ("--pool sequence --rules topk+recent", "one part at most may leave its number open"),
        (
            "--pool sequence --n 16 --rules topk:55+recent",
            "topk:55+recent keeps more keys surely than 51, 80% of the 64",
        ),
        (
            "--pool sequence --n 16 --rules topk:70+recent",
            "topk: expected at most 64, the number of keys, got 70; esscher rules",
        ),
        ("--rules topk", "rules: they are of a query's own context; use --pool sequence"),
        ("--scale 1,0", "scales: expected finite numbers above 0, got [1.0, 0.0]"),
        ("--scale 1;2", "scales: expected numbers such as 0.1,1,10, got '1;2'"),
        ("--moments -1", "moments"),
        ("--dtype int8", "dtype"),
        ("--device tpu9", "device"),
        ("--packaged poems", "packaged"),
        ("--config nowhere.yaml", "nowhere.yaml"),
        ("--workers 0", "workers"),
        ("--colour red", "--colour"),
    ],
)
def test_settings_that_make_no_sense(
    folder: Path,
    text: Path,
    tmp_path: Path,
    flags: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    source_flags = [] if "packaged" in flags else ["--text", str(text)]
    line = refused(
        [str(folder), *source_flags, "--out", str(out), "--no-report", *QUICK, *flags.split()],
        capsys,
    )
    assert said in line
    assert not (out / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.txt", None, "missing.txt"),
        ("empty.txt", b"", "empty.txt"),
        ("blank.txt", b" \n\t\n", "text"),
        ("binary.txt", bytes(range(256)) * 40, "binary.txt"),
        ("wide.txt", "wide letters ".encode("utf-16") * 50, "UTF-8"),
        ("latin.txt", "caf\xe9 na\xefve ".encode("latin-1") * 50, "convert it to UTF-8"),
    ],
)
def test_texts_that_cannot_be_read(
    folder: Path,
    tmp_path: Path,
    name: str,
    content: bytes | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    line = refused(
        [str(folder), "--text", str(path), "--out", str(tmp_path / "run"), *QUICK], capsys
    )
    assert said in line


def test_models_that_cannot_be_used(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    rest = ["--text", str(text), "--out", str(tmp_path / "run"), *QUICK]
    assert "no-such/model" in refused(["no-such/model", *rest], capsys)
    nans = shutil.copytree(folder, tmp_path / "nans")
    weights = load_file(nans / "model.safetensors")
    weights["encoder.layer.0.attention.self.query.weight"][3, 5] = torch.nan
    save_file(weights, nans / "model.safetensors", metadata={"format": "pt"})
    line = refused([str(nans), *rest], capsys, weights=True)
    assert "1 NaN or infinite" in line
    assert "get the checkpoint again" in line
    pickled = shutil.copytree(folder, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert "safetensors" in refused([str(pickled), *rest], capsys)
    (pickled / "pytorch_model.bin").unlink()
    refused([str(pickled), *rest], capsys)
    wordless = shutil.copytree(folder, tmp_path / "wordless")
    for path in wordless.glob("*token*"):
        path.unlink()
    assert "no tokenizer" in refused([str(wordless), *rest], capsys)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "falcon alibi", "gptj"])
def test_models_that_attend_in_their_own_code(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among them those whose position bias is ALiBi. Nothing is begun."""
    family, *more = name.split()
    config, options = REFUSED[family]
    build(config, {**options, **dict.fromkeys(more, True)}).save_pretrained(tmp_path / "model")
    tokenizer("gpt2").save_pretrained(tmp_path / "model")
    capsys.readouterr()
    line = refused(
        [str(tmp_path / "model"), "--text", str(text), "--out", str(tmp_path / "run"), *QUICK],
        capsys,
    )
    assert "computes attention in its own code" in line
    assert not (tmp_path / "run").exists()


def test_two_sources_of_text(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(
        [
            str(folder),
            "--text",
            str(text),
            "--packaged",
            "prose",
            "--out",
            str(tmp_path / "run"),
            *QUICK,
        ],
        capsys,
    )
    assert "leave all but one out" in line


def test_a_folder_with_other_things_is_not_touched(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused_line = run(
        ["probe", str(folder), "--text", str(text), "--out", str(tmp_path), *QUICK], capsys
    )
    assert refused_line[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_no_arguments_are_the_packaged_model_and_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder()
    code, shown, _ = run(
        [
            "probe",
            "--max-tokens",
            "1024",
            "--queries",
            "8",
            "--kept-queries",
            "2",
            "--out",
            str(tmp_path),
            "--workers",
            "1",
            "--json",
        ],
        capsys,
    )
    assert code == 0
    found = json.loads(shown)
    assert len(found["heads"]) == 72
    assert found["about"][0]["text"] == "packaged prose"
