"""Runs of compression: tables, single units, a killed run, every query with keys of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from esscher.compress.job import COMPRESS, kind_of
from esscher.compress.metrics import Outcome, metrics
from esscher.compress.spec import CompressSpec
from esscher.compress.tables import columns
from esscher.compress.text import Text, plant
from esscher.runs import Run, execute, load_run
from esscher.runs.store import Store
from tests.compress.runs import RULES, source, spec

ROOT = Path(__file__).parents[2]
ASKED: dict[str, Any] = {
    "rules": [*RULES, "fisher"],
    "splits": ["uniform", "cut"],
    "keep": [0.4, 0.6, 0.8],
    "needles": 2,
    "needle_kinds": ["single", "distractor"],
    "sensitivity": True,
    "together": True,
    "check": True,
}


@pytest.fixture(scope="module")
def cache_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return execute(spec("llama", **ASKED), tmp_path_factory.mktemp("compress") / "run")


def test_tables_of_a_language_model(cache_run: Run) -> None:
    names = {"about", "draws", "compress", "layers", "depth", "sensitivity", "together"}
    names |= {"check", "kinds", "tokens"}
    assert set(cache_run.tables) == names
    rows = cache_run.table("compress")
    wanted = {"kl", "kl_low", "kl_high", "kl_predicted", "kl_cross", "loss_added", "agreement"}
    assert wanted | {"needle", "q95", "error", "bytes", "bytes_full", "keys"} <= set(rows)
    kl = rows[(rows["split"] == "cut") & (rows["rule"] == "fisher")]
    assert kl["share"].tolist() == pytest.approx([0.4, 0.6, 0.8], abs=0.01)
    assert (kl["bytes"] / kl["bytes_full"]).tolist() == pytest.approx(kl["share"].tolist())
    assert kl["kl"].is_monotonic_decreasing
    # random weights have a nearly linear model: the prediction is of the right size
    assert kl["kl_predicted"].tolist() == pytest.approx(kl["kl"].tolist(), rel=1.0)
    assert kl["kl_cross"].tolist() == pytest.approx(kl["kl"].tolist(), rel=1.0)
    assert len(cache_run.table("sensitivity")) == 2 * 4
    assert len(cache_run.table("together")) == 2 * 2 * 2


def test_every_column_is_declared(cache_run: Run) -> None:
    declared = columns(CompressSpec())
    for name in set(cache_run.tables) - {"about"}:
        assert set(cache_run.columns(name)) <= {column.key for column in declared[name]}


def test_what_was_kept(cache_run: Run) -> None:
    """Counts of heads add up to the keys kept, shares of kinds to 1, and pieces to the prompt."""
    tokens, kinds = cache_run.table("tokens"), cache_run.table("kinds")
    found = source("llama", **ASKED)
    text = Text(found, found.ids(int(found.texts[0])), found.prefill)
    cell = next(cell for cell in text.cells() if cell.keep == 0.6)
    choice = text.choice(cell)
    own = tokens[(tokens["keep"] == 0.6)]
    assert set(own["rule"]) == {cell.rule}
    assert own["position"].tolist() == list(range(found.prefill))
    assert own["heads"].map(sum).sum() == sum(int(rows.sum()) for rows in choice.kept.values())
    assert own["heads_all"].map(list).iloc[0] == [2, 2]
    ids = text.ids[0, : found.prefill].tolist()
    assert "".join(own["token"]) == found.loaded.tokenizer.decode(ids)
    for _, part in kinds.groupby(["rule", "split", "keep"]):
        assert part["kept_share"].sum() == pytest.approx(1)
        assert part["held_share"].sum() == pytest.approx(1)
    first = kinds[(kinds["kind"] == "first tokens") & (kinds["rule"] == RULES[0])]
    assert first["held_share"].tolist() == pytest.approx([4 / 60] * len(first))
    assert (first["kept_share"] > first["held_share"]).all()  # two sinks are always kept


@pytest.mark.parametrize(
    ("piece", "kind"),
    [
        (" .", "punctuation"),
        ("", "punctuation"),
        ("\n", "punctuation"),
        ("\ufffd", "punctuation"),
        (" 12", "numbers"),
        (" Paris", "capitalised"),
        ("\u00c9cole", "capitalised"),
        ("ing", "other"),
    ],
)
def test_kinds_of_tokens(piece: str, kind: str) -> None:
    assert kind_of(piece, 9) == kind
    assert kind_of(piece, 0) == "first tokens"


def test_a_value_is_of_one_draw(cache_run: Run) -> None:
    draws = cache_run.table("draws")
    same = (draws["rule"] == RULES[0]) & (draws["metric"] == "kl") & (draws["keep"] == 0.4)
    random = draws[same]
    places = sorted(zip(random["text"], random["draw"], strict=True))
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert random["value"].nunique() == 4
    rows = cache_run.table("compress")
    row = rows[(rows["rule"] == RULES[0]) & (rows["keep"] == 0.4)].iloc[0]
    assert row["kl"] == pytest.approx(random.groupby("text")["value"].mean().mean())


def test_measured_by_hand(cache_run: Run) -> None:
    """The divergence of one cell from the model itself, its keys hidden by an additive mask over
    the whole sequence.
    """
    found = source("llama", **ASKED)
    text = Text(found, found.ids(int(found.texts[1])), found.prefill)
    cell = next(cell for cell in text.cells() if cell.rule == "fisher" and cell.keep == 0.4)
    choice, model, total = text.choice(cell), found.loaded.model, found.prefill + found.decode
    mask = torch.ones(total, total).tril().bool()
    hooks = []
    for layer, module in enumerate(model.model.layers):
        later = torch.ones(2, found.decode, dtype=torch.bool)
        own = mask.expand(4, -1, -1).clone()
        kept = torch.cat([choice.kept[layer], later], 1).repeat_interleave(2, 0)
        own[:, found.prefill :] &= kept[:, None]
        added = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)[None]

        def hide(module: Any, args: Any, kwargs: Any, added: torch.Tensor = added) -> Any:
            return args, {**kwargs, "attention_mask": added}

        hooks.append(module.self_attn.register_forward_pre_hook(hide, with_kwargs=True))
    with torch.no_grad():
        kept = model(input_ids=text.ids).logits[0, found.prefill :].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        full = model(input_ids=text.ids).logits[0, found.prefill :].log_softmax(-1)
    by_hand = float((full.exp() * (full - kept)).sum(-1).mean())
    draws = cache_run.table("draws")
    same = (draws["rule"] == "fisher") & (draws["split"] == cell.split) & (draws["keep"] == 0.4)
    (value,) = draws[same & (draws["metric"] == "kl") & (draws["text"] == 1)]["value"]
    assert value == pytest.approx(by_hand, rel=1e-3)


def test_errors_of_heads_add(cache_run: Run) -> None:
    """A layer's error lies between 0 and the sum over its heads: sqrt(4) times the independent."""
    layers = cache_run.table("layers")
    assert (layers["error"] > 0).any()
    assert (layers["error"] <= 2 * layers["independent"] * 1.001).all()
    together = cache_run.table("together")
    assert (together["exact"] > 0).all()


def test_heads_together_are_as_drawn() -> None:
    """The exact error of a layer at two queries against 2,000 draws of random keys, one set for all
    heads: 4 standard errors (false alarm 1 in 16,000).
    """
    from esscher.compress.choose import inclusion
    from esscher.compress.heads import SHARED, _spread, random_cell, together_rows

    found = source("llama", rules=["sinks:2+random"], keep=[0.4], texts=1, dtype="float64")
    text = Text(found, found.ids(int(found.texts[0])), found.prefill)
    cell = random_cell(text)
    assert cell is not None
    (row,) = [row for row in together_rows(text, cell, [1]) if row["subset"] == SHARED]
    call = next(call for call in text.calls if call.layer == 1)
    rule = found.rules[cell.rule]
    chance = inclusion(text.prompt, rule, (1, 0), cell.keep).probability[0]
    at = _spread(call)
    scores, output = call.scores(at)[0].double(), found.outputs[1].double()
    values = call.value[0].double().repeat_interleave(call.shared, 0)
    chance = torch.cat([chance, torch.ones(scores.shape[-1] - len(chance), dtype=torch.float64)])
    g = torch.Generator().manual_seed(4)
    full = torch.bmm(torch.softmax(scores, -1) @ values, output).sum(0)
    squares = []
    for _ in range(2000):
        kept = torch.rand(len(chance), generator=g, dtype=torch.float64) < chance
        out = torch.softmax(scores.masked_fill(~kept, -torch.inf), -1) @ values
        squares.append(float((torch.bmm(out, output).sum(0) - full).square().sum()))
    drawn, size = torch.tensor(squares), float(full.square().sum())
    wanted = row["exact"] ** 2 * size
    assert abs(float(drawn.mean()) - wanted) < 4 * float(drawn.std()) / len(drawn) ** 0.5


def test_needles_stand_in_the_prompt_and_are_asked_for_behind_it() -> None:
    found = source("llama", **ASKED)
    words = found.loaded.tokenizer
    for number, kind in enumerate(("single", "distractor")):
        needle = plant(found, number, kind)
        answer = torch.tensor(needle.answers[0][1])
        parts = needle.ids[0, : found.prefill], needle.ids[0, found.prefill :], answer
        told, asked, code = (
            words.decode(ids).replace(" ", "").replace("\u2581", " ").strip() for ids in parts
        )
        assert "secret code of" in told
        assert code in told
        assert asked.endswith(code)
        rows = torch.zeros(needle.ids.shape[1] - found.prefill, len(words))
        rows[torch.arange(len(rows) - 1), needle.ids[0, found.prefill + 1 :]] = 1.0
        text = Text(found, needle.ids, needle.tokens)
        said = text.outcome(type("Result", (), {"logits": rows[None]}))
        assert needle.found(said) == 1.0
        said.rows[-2] = -said.rows[-2]
        assert needle.found(said) == 0.0


@pytest.mark.parametrize(
    ("model", "measured"),
    [
        ("bert", {"cosine", "error"}),
        ("classifier", {"kl", "agreement", "error"}),
        ("gpt2", {"kl", "agreement", "loss", "error"}),
    ],
)
def test_every_query_keeps_a_few(model: str, measured: set[str], tmp_path: Path) -> None:
    rules = ["random", "topk", "impact"]
    run = execute(
        spec(model, when="every", rules=rules, window=40, keep=[0.4, 0.7]), tmp_path / "run"
    )
    assert set(run.table("draws")["metric"]) == measured
    rows = run.table("compress")
    error = rows[rows["rule"] == "topk"]["error"]
    assert error.is_monotonic_decreasing
    assert (error > 0).all()


def test_a_loss_in_place_of_a_size(tmp_path: Path) -> None:
    asked = spec("gpt2", rules=["fisher", "random"], keep=None, kl=1e-4)
    run = execute(asked, tmp_path / "run")
    rows = run.table("compress")
    rows = rows[rows["rule"] != "full"]
    assert rows["keep"].isna().all()
    assert rows["share"].between(0.3, 1.0).all()


def test_a_killed_run_is_finished_by_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in the first unit of single heads; a local Dask cluster does the rest, to the same
    bytes.
    """
    asked = spec("llama", rules=RULES[1:], texts=1, sensitivity=True)
    path, out = tmp_path / "spec.yaml", tmp_path / "killed"
    path.write_text(yaml.safe_dump(asked.as_dict()), encoding="utf-8")
    code = (
        "import os, signal, sys; from esscher.compress import job; from esscher.runs import"
        " execute\njob.head_rows = lambda *arguments: os.kill(os.getpid(),"
        " signal.SIGKILL)\nexecute(sys.argv[1], sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(path), str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    whole = execute(asked, tmp_path / "whole")
    assert 1 <= Store(out).count() < whole.manifest.units
    assert load_run(out).status != "complete"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        resumed = execute(asked, out, dask=cluster.scheduler_address)
    assert resumed.manifest.starts[1].executor.startswith("dask")
    for name in set(whole.tables) | set(resumed.tables):
        files = (run.path / f"{name}.parquet" for run in (resumed, whole))
        one, other = (file.read_bytes() for file in files)
        assert one == other, name


def test_a_unit_depends_on_nothing_that_was_computed_before(cache_run: Run) -> None:
    opened = COMPRESS.open(CompressSpec.read(dict(cache_run.spec)))
    draws = cache_run.table("draws")
    for unit, metric in (({"text": 1}, "kl"), ({"needle": 0, "kind": "single"}, "needle")):
        rows = [row for row in COMPRESS.compute(opened, unit)["draws"] if row["metric"] == metric]
        own = draws[(draws["text"] == rows[0]["text"]) & (draws["metric"] == metric)]
        assert own["value"].tolist() == [row["value"] for row in rows]


def test_only_some_layers_drop(tmp_path: Path) -> None:
    asked = spec("llama", rules=["sinks:2+recent"], layers=[1], texts=1)
    layers = execute(asked, tmp_path / "run").table("layers")
    assert set(layers["layer"]) == {1}
    assert (layers["error"] > 0).all()


def test_a_cache_that_is_compressed_again(tmp_path: Path) -> None:
    """The mean over prompts that grew by what was decoded, as if each were given alone."""
    asked = {"rules": ["fisher"], "splits": ["cut"], "keep": [0.6], "texts": 1}
    run = execute(spec("llama", **asked, again=4), tmp_path / "again")
    (measured,) = run.table("compress").query("rule == 'fisher'")["kl"]
    opened = source("llama", **asked)
    ids, found = opened.ids(int(opened.texts[0])), []
    for grown in (60, 64, 68):
        text = Text(opened, ids[:, : grown + 4], grown)
        (cell,) = text.cells()
        found.append(metrics()["kl"].value(text.full, text.run(cell)[1]))
    assert measured == pytest.approx(sum(found) / 3, rel=1e-6)
    assert len(run.table("tokens")) == 60


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "llama", "again": 5}, "again: expected a divisor of the 12 decoded tokens"),
        ({"model": "llama", "rules": ["kvzip"], "replay": 1.5}, "replay"),
        ({"model": "bert", "when": "cache"}, "no language model and has no KV cache"),
        ({"model": "bert", "needles": 2}, "needles: it is of a KV cache"),
        ({"model": "llama", "layers": [7]}, "layers: .* has layers 0 to 1, got 7"),
        ({"model": "llama", "texts": 500}, "texts: the text fills"),
        ({"model": "llama", "window": 300}, "window: .* takes at most 128 positions"),
        ({"model": "llama", "kl": 0.1}, "keep, kl: give a size or a loss, not both"),
        ({"model": "llama", "rules": ["topk"]}, "topk chooses keys for each query"),
        ({"model": "llama", "rules": ["fisher"], "keep": [0.2]}, "keep: fisher always keeps 20"),
        ({"model": "llama", "rules": ["recent:4"]}, "expected rules with one part that has no"),
        ({"model": "llama", "keep": [1.5]}, "expected shares of the cache above 0"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(COMPRESS.units(COMPRESS.open(spec(**settings))))


def test_several_facts_are_told_and_all_asked_for() -> None:
    found = source("llama", **(ASKED | {"window": 100, "needles": 1, "decode": 4}))
    needle = plant(found, 0, "several")
    words = found.loaded.tokenizer
    assert needle.ids[0, : found.prefill].shape == (found.prefill,)
    told = words.decode(needle.ids[0, : found.prefill]).replace(" ", "")
    codes = [words.decode(answer).replace(" ", "") for _, answer in needle.answers]
    assert len(set(codes)) == 4
    assert all(code in told for code in codes)
    for place, answer in needle.answers:
        assert needle.ids[0, place : place + len(answer)].tolist() == answer
    rows = torch.zeros(needle.ids.shape[1] - found.prefill, len(words))
    rows[torch.arange(len(rows) - 1), needle.ids[0, found.prefill + 1 :]] = 1.0
    text = Outcome("language", rows)
    assert needle.found(text) == 1.0
    rows[needle.answers[1][0] - found.prefill - 1] *= -1
    assert needle.found(text) == 0.75
