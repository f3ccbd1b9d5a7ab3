"""``esscher budget`` of keep rules, on a stored probe whose frontier is known in closed form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import esscher as es
from esscher.probe.budget import Asked, budget_table, rule_budget
from tests.cli.commands import run
from tests.models.frontiers import frontier, frontier_run
from tests.models.probe_runs import few_texts, tiny_model


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return frontier_run(tmp_path_factory.mktemp("rules") / "run").path


def test_the_budget_of_a_rule(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["budget", str(probed), "--rule", "heavy", "--epsilon", ".1"], capsys)
    assert (code, err) == (0, "")
    summary, header, *lines, following = out.splitlines()
    assert summary.startswith("heavy for an error of 10% in each head's output: it keeps")
    assert summary.endswith("; all 8 heads of the model.")
    assert " ".join(header.split()).startswith("layer kv head keys of the cache error")
    want = rule_budget(frontier(), "heavy", 0.1)
    assert len(lines) == len(want.caches) == 4
    assert sorted(float(line.split()[2]) for line in lines) == pytest.approx(
        sorted(want.caches["keys"]), rel=5e-3
    )
    command = f"esscher budget {probed} --epsilon 0.1 --rule heavy --json > budget.json"
    assert following == f"Next: {command}"
    out = run(["budget", str(probed), "--rule", "heavy", "--all"], capsys)[1]
    worst = want.totals.set_index("split").loc["uniform"]
    assert any(
        line.startswith("uniform ") and worst["worst_head"] in line for line in out.splitlines()
    )
    code, out, _ = run(["budget", str(probed), "--rule", "heavy", "--json"], capsys)
    found = json.loads(out)
    assert code == 0
    assert (found["rule"], found["epsilon"], found["text"], found["window"]) == (
        "heavy",
        0.1,
        "prose.txt",
        512,
    )
    assert [row["keys"] for row in found["caches"]] == want.caches["keys"].tolist()


def test_a_total_is_not_headed_by_an_error(
    probed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--rule", "heavy"], []):
        code, out, _ = run(["budget", str(probed), "--total", "300", *arguments], capsys)
        assert code == 0
        assert "300 keys in all" in out.splitlines()[0]
        assert "for an error" not in out
        assert "every head at the error" not in out


def test_without_a_rule_every_rule_is_named_with_its_total(
    probed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["budget", str(probed)], capsys)
    assert code == 0
    summary, header, *lines, following = out.splitlines()
    want = rule_budget(frontier(), "heavy", 0.1).totals.set_index("split")
    best = want.loc["best split"]
    assert f": heavy keeps {best['ratio']:.1%} of the cache for an error of 10%" in summary
    same = want.loc["uniform", "ratio"]
    assert (
        f", if heads may keep different numbers of keys; {same:.1%} if all keep the same share."
        in summary
    )
    assert " ".join(header.split()).startswith("rule of the cache runs on uniform")
    # the smallest cache first, then rules that need all keys, and the bound last
    assert lines[0].split()[:4] == ["heavy", f"{best['ratio']:.3g}", "any", "cache"]
    assert [line.split()[0] for line in lines if "needs all keys" in line] == ["topk", "neyman"]
    assert following == f"Next: esscher budget {probed} --rule heavy"
    code, out, _ = run(["budget", str(probed), "--json"], capsys)
    rules = ("random", "sinks:4+recent", "heavy", "topk", "neyman")
    assert {(row["rule"], row["split"]) for row in json.loads(out)["rules"]} == {
        (rule, split)
        for rule in rules
        for split in ("every head at the error", "uniform", "best split")
    }


def test_what_was_not_measured_is_not_called_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two layers of thirty: on the terminal, as JSON, and in Python."""
    path = str(frontier_run(tmp_path / "run", layers=30, heads=4).path)
    for arguments in ([], ["--rule", "heavy"], ["--json"], ["--rule", "heavy", "--json"]):
        code, out, _ = run(["budget", path, *arguments], capsys)
        assert code == 0
        assert "8 of 120 heads, 2 of 30 layers" in out
        assert "of the model" not in out
        assert "all heads" not in out
    assert "heavy, 8 of 120 heads, 2 of 30 layers; every head" in repr(
        es.load_run(path).budget(rule="heavy")
    )
    whole = str(frontier_run(tmp_path / "whole", heads=4).path)
    assert "all 8 heads of the model" in run(["budget", whole], capsys)[1]


def test_a_rule_of_each_query_says_that_the_cache_holds_all(
    probed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(["budget", str(probed), "--rule", "topk"], capsys)[1]
    assert out.startswith(
        "topk for an error of 10% in each head's output: the cache holds all keys"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rule", "best"], "no rule 'best'; esscher rules lists all rules"),
        (["--rule", "random:1.5"], "random"),
        (["--rule", ""], "expected a rule such as"),
        (
            ["--rule", "keynorm"],
            "no errors of keynorm; it has those of random, sinks:4+recent, heavy, topk, neyman",
        ),
        (["--rule", "heavy:32"], "no errors of heavy:32"),
        (
            ["--rule", "heavy", "--total", "7"],
            "total: expected between 8 (the smallest sizes of heavy measured) and 1600",
        ),
        (
            ["--total", "20"],
            "total: expected between 32 (the smallest sizes of sinks:4+recent measured)",
        ),
        (["--rule", "heavy", "--total", "1601"], "total: expected between 8"),
        (["--rule", "heavy", "--epsilon", "1"], "between 0 and 1"),
        (["--kvpress", "x.npy"], "--kvpress: give the rule, one of random, sinks:4+recent"),
        (["--rule", "topk", "--kvpress", "x.npy"], "topk chooses keys for each query"),
        (["--rule", "heavy", "--kvpress", "."], "it exists already; give another name"),
        (["--kvpress", "x.npy", "--total", "200"], "leave --epsilon, --total and --kl out"),
        (["--rule", "heavy", "--kl", "0.1", "--kvpress", "x.npy"], "--kl out"),
    ],
)
def test_bad_input(
    probed: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["budget", str(probed), *arguments], capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


# ---- losses in nats


def test_the_smallest_cache_for_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = frontier_run(tmp_path / "run", frontier(nats=True)).path
    asked = ["budget", str(path), "--kl", "0.05"]
    code, out, err = run(asked, capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 12
    assert ": heavy keeps " in lines[0]
    assert " of the cache for a loss of 0.05 nats per token (predicted loss 0.0" in lines[0]
    model, text = "example/six-layers", "prose.txt"
    assert lines[-1] == (
        f"Next: esscher compress {model} --text {text} --window 448 --decode 64 --kl 0.05"
        " --rules heavy --rules fisher+refit"
    )
    assert (
        run(["budget", str(path)], capsys)[1] == out
    )  # where there are losses it is what is asked
    rows = json.loads(run([*asked, "--json"], capsys)[1])
    assert (rows["kl"], rows["epsilon"], rows["total"]) == (0.05, None, None)
    by = {(row["rule"], row["split"]): row for row in rows["rules"]}
    assert {("heavy", split) for split in ("uniform", "one cut", "best split")} <= by.keys()
    for row in by.values():
        assert row["nats_low"] < row["nats"] <= 0.05 * (1 + 1e-3) < row["nats_high"]
        assert not row["beyond"]
    code, out, _ = run([*asked, "--rule", "heavy"], capsys)
    assert code == 0
    assert out.startswith("heavy for a loss of 0.05 nats per token: it keeps ")
    assert len(out.splitlines()) <= 12
    found = json.loads(run([*asked, "--rule", "heavy", "--json"], capsys)[1])
    want = rule_budget(frontier(nats=True), "heavy", kl=0.05)
    assert [row["nats"] for row in found["caches"]] == want.caches["nats"].tolist()
    assert found["kl"] == 0.05
    assert [row["keys"] for row in found["caches"]] == want.caches["keys"].tolist()
    out = run(["budget", str(path), "--kl", "0.5"], capsys)[1]
    assert "A loss above 0.2 nats is larger than predicted." in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kl", "0.05"], "has no losses in nats: the model has no language head"),
        (["--kl", "0"], "kl: expected a finite number above 0"),
        (["--kl", "-1"], "kl: expected a finite number above 0"),
        (["--kl", "nan"], "kl: expected"),
        (["--kl", "0.1", "--epsilon", "0.1"], "expected one of an error, a total and a loss"),
    ],
)
def test_losses_that_cannot_be_told(
    probed: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["budget", str(probed), *arguments], capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_whose_heads_share_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of totals for every rule and error, and keys of every key-value head."""
    model, words = tiny_model("llama")
    settings = {
        "max_tokens": 96,
        "window": 48,
        "queries": 4,
        "kept_queries": 2,
        "rules": ("random", "heavy"),
    }
    stored = es.probe(
        model, few_texts(), tokenizer=words, out=tmp_path / "run", pool="sequence", **settings
    )
    about, totals = stored.table("about").iloc[0], stored.table("budget")
    assert len(totals) == 2 * 3 * 3 + 5  # heavy has one cut too
    asked = [*(Asked(e) for e in (0.05, 0.1, 0.2)), Asked(kl=0.05)]
    pd.testing.assert_frame_equal(totals, budget_table(stored.table("frontier"), asked))
    for table in ("budget", "frontier", "nats", "fisher"):
        assert all(column.help and column.label for column in stored.columns(table).values())
    losses = run(["budget", str(stored.path), "--kl", "0.001", "--json"], capsys)[1]
    for row in json.loads(losses)["rules"]:
        assert 0 < row["nats"] <= 0.001 * (1 + 1e-3) or row["ratio"] == 1.0
    found = json.loads(run(["budget", str(stored.path), "--rule", "heavy", "--json"], capsys)[1])
    assert [(row["layer"], row["kv_head"]) for row in found["caches"]] == [
        (layer, kv) for layer in range(about["layers"]) for kv in range(about["kv_heads"])
    ]
    assert all(row["heads"] == about["heads"] // about["kv_heads"] for row in found["caches"])


# ---- the array of kvpress


def test_the_array_of_kvpress(
    probed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row i drops (i + 1) % of all keys, and each row is the best split of that many."""
    file = tmp_path / "new" / "heavy.npy"
    asked = ["budget", str(probed), "--rule", "heavy", "--kvpress", str(file)]
    assert run(asked, capsys) == (0, "", f"{file}\n")
    found = np.load(file, allow_pickle=False)
    assert found.shape == (99, 2, 2)
    np.testing.assert_allclose(found.mean((1, 2)), np.arange(1, 100) / 100, atol=1e-3)
    whole = json.loads(
        run(["budget", str(probed), "--rule", "heavy", "--total", "800", "--json"], capsys)[1]
    )
    kept = [row["keys"] / row["n_keys"] for row in whole["caches"]]
    np.testing.assert_allclose(1 - found[49].flatten(), kept, atol=1e-6)


@pytest.mark.parametrize("rule", ["neyman:shared", "sinks:4+random:reweight", "strided:8+heavy"])
def test_rules_that_no_press_can_follow_are_refused(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A press drops keys once, and those it keeps have no weights."""
    path = frontier_run(tmp_path / "run", table=frontier({rule: 0.5})).path
    code, out, err = run(["budget", str(path), "--rule", rule, "--kvpress", "x.npy"], capsys)
    assert (code, out) == (2, "")
    assert f"--kvpress: {rule} chooses keys for each query or gives them weights" in err


def test_a_run_of_some_layers_has_no_array(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = frontier_run(tmp_path / "run", layers=30).path
    code, out, err = run(["budget", str(path), "--rule", "heavy", "--kvpress", "x.npy"], capsys)
    assert (code, out) == (2, "")
    assert "expected 2 key-value heads of 30 layers, got 4 in all" in err


def test_python_and_the_commands_recommend_one_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of rules that need the same keys, the one of less loss; where no rule runs on any cache, none
    is recommended, and the keys are those of the first by the same order.
    """
    whole = frontier(nats=True).assign(cut=np.nan)

    def times(rows: pd.DataFrame, factor: float, rule: str) -> pd.DataFrame:
        windows = [[factor * one for one in each] for each in rows["nats_windows"]]
        return rows.assign(rule=rule, nats=factor * rows["nats"], nats_windows=windows)

    for rules, loss in ((("heavy", "random"), 0.9), (("random", "heavy"), 1.1)):
        # both need the least share; the second rule of the table loses less, or more
        same = whole[whole["rule"] == "heavy"]
        parts = [times(same, 1e-6, rules[0]), times(same, 1e-6 * loss, rules[1])]
        table = pd.concat([whole[whole["rule"] == "neyman"], *parts])
        path = frontier_run(tmp_path / rules[0], table).path
        found = es.budget(path, kl=0.05)
        assert found.rules is not None
        best = found.rules[found.rules["split"] == "best split"].set_index("rule")
        assert best.loc[rules[0], "ratio"] == best.loc[rules[1], "ratio"]
        assert found.rule == best.drop("neyman")["nats"].idxmin()
        said = run(["budget", str(path), "--kl", "0.05"], capsys)[1]
        assert f": {found.rule} keeps " in said
    table = whole[whole["rule"].isin(["topk", "neyman"])]
    path = frontier_run(tmp_path / "queries", table).path
    assert es.budget(path).rule == "topk"
    said = run(["budget", str(path)], capsys)[1].splitlines()
    assert "no rule that was measured runs on any cache" in said[0]
    assert said[2].split()[0] == "topk"
