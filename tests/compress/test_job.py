"""Whole runs on tiny random models of every task: their tables, resumed, over processes, and what
is refused.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from esscher.compress.job import DOWNSTREAM
from esscher.compress.spec import DownstreamSpec
from esscher.compress.tables import columns
from esscher.compress.text import Text, plant
from esscher.runs import Run, execute, load_run
from esscher.runs.store import Store
from tests.compress.runs import RULES, source, spec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cache_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    asked = spec(
        "llama",
        rules=RULES,
        splits=["uniform", "cut"],
        needles=2,
        sensitivity=True,
        depth=True,
        together=True,
    )
    return execute(asked, tmp_path_factory.mktemp("downstream") / "run")


def test_tables_of_a_language_model(cache_run: Run) -> None:
    assert set(cache_run.tables) == {
        *(
            "about",
            "draws",
            "downstream",
            "layers",
            "depth",
            "propagation",
            "sensitivity",
            "correlations",
            "together",
        ),
        *("fixed", "agreement"),
    }
    found = cache_run.table("downstream")
    assert set(found["reading"]) == {"kl", "agreement", "loss", "error", "needle", "q95"}
    kl = found[(found["reading"] == "kl") & (found["split"] == "uniform")]
    assert list(kl["rule"]) == [rule for rule in RULES for _ in range(3)]
    assert np.allclose(kl["share"].to_numpy()[3:], [0.2, 0.4, 0.7])
    # more keys, less change
    assert (kl.groupby("rule")["value"].last() < kl.groupby("rule")["value"].first()).all()
    assert set(kl["texts"]) == {2}
    assert len(cache_run.table("sensitivity")) == 2 * 4
    assert set(cache_run.table("propagation")["layer"]) == {-1, 0, 1}


def test_every_column_is_declared(cache_run: Run) -> None:
    declared = columns(DownstreamSpec())
    for name in set(cache_run.tables) - {"about"}:
        assert set(cache_run.columns(name)) == {column.key for column in declared[name]}


def test_a_value_is_of_one_draw(cache_run: Run) -> None:
    draws = cache_run.table("draws")
    random = draws[
        (draws["rule"] == RULES[0]) & (draws["reading"] == "kl") & (draws["size"] == 0.4)
    ]
    assert sorted(zip(random["text"], random["draw"], strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert random["value"].nunique() == 4
    mean = random.groupby("text")["value"].mean().mean()
    found = cache_run.table("downstream")
    row = found[
        (found["rule"] == RULES[0]) & (found["reading"] == "kl") & (found["size"] == 0.4)
    ].iloc[0]
    assert row["value"] == pytest.approx(mean)


def test_measured_by_hand(cache_run: Run) -> None:
    """The divergence of one cell from the model itself, its keys hidden by an additive mask over
    the whole sequence.
    """
    found = source(
        "llama",
        rules=RULES,
        splits=["uniform", "cut"],
        needles=2,
        sensitivity=True,
        depth=True,
        together=True,
    )
    text = Text(found, found.ids(int(found.texts[1])), found.prefill, {})
    cell = next(cell for cell in text.plan.cells() if cell.rule == RULES[1] and cell.size == 0.4)
    choice, model, total = text.plan.choose(cell), found.loaded.model, found.prefill + found.decode
    mask = torch.ones(total, total).tril().bool()
    hooks = []

    def hide(layer: int) -> Any:
        kept = torch.cat(
            [choice.kept[layer], torch.ones(2, found.decode, dtype=torch.bool)], 1
        ).repeat_interleave(2, 0)
        own = mask.expand(4, -1, -1).clone()
        own[:, found.prefill :] &= kept[:, None]
        return torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)[None]

    for layer, module in enumerate(model.model.layers):
        added = hide(layer)
        hooks.append(
            module.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, added=added: (
                    args,
                    {**kwargs, "attention_mask": added},
                ),
                with_kwargs=True,
            )
        )
    with torch.no_grad():
        kept = model(input_ids=text.ids).logits[0, found.prefill :].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        full = model(input_ids=text.ids).logits[0, found.prefill :].log_softmax(-1)
    by_hand = float((full.exp() * (full - kept)).sum(-1).mean())
    draws = cache_run.table("draws")
    same = (
        (draws["rule"] == cell.rule) & (draws["split"] == cell.split) & (draws["size"] == cell.size)
    )
    (value,) = draws[same & (draws["reading"] == "kl") & (draws["text"] == 1)]["value"]
    assert value == pytest.approx(by_hand, rel=1e-3)


def test_layers_at_fixed_inputs(cache_run: Run) -> None:
    """The first layer's inputs are the full model's, and errors of heads add: at most the sum of
    their lengths.
    """
    layers = cache_run.table("layers")
    assert (layers.loc[layers["layer"] == 0, "inputs"] == 0).all()
    assert (layers.loc[layers["layer"] == 1, "inputs"] > 0).all()
    # four heads: at most sqrt(4) of the root sum of squares
    assert (layers["fixed"] <= 2 * layers["independent"] + 1e-6).all()


def test_heads_together_are_as_drawn(cache_run: Run) -> None:
    """Eight exact errors against 400 draws each, within 3.1 standard errors (false alarm 1 in
    70).
    """
    rows = cache_run.table("together")
    assert len(rows) == 2 * 2 * 2
    middle, half = (rows["low"] + rows["high"]) / 2, (rows["high"] - rows["low"]) / 2
    assert ((rows["exact"] - middle).abs() < 1.6 * half).all()
    own = rows[rows["subset"] == "one for each head"]
    assert (own["exact"] / own["independent"] - 1).abs().max() < 0.5
    assert not np.allclose(
        rows[rows["subset"] == "one for all heads"]["exact"], own["exact"], rtol=0.01
    )


def test_layers_at_fixed_inputs_are_predicted(cache_run: Run) -> None:
    """Without chance to rounding; with it, eight errors and eight covariances within twice their 95
    % interval of 60 draws (Student's; false alarm 1 in 700 each, 1 in 40 in all).
    """
    rows = cache_run.table("fixed")
    assert len(rows) == 2 * 2 * len(RULES)  # texts, layers, rules
    sure, drawn = rows[rows["draws"] == 1], rows[rows["draws"] > 1]
    assert set(sure["rule"]) == {RULES[1]}
    assert np.allclose(sure["predicted"], sure["measured"], rtol=1e-4)
    assert np.allclose(sure["common"], sure["common_measured"], rtol=1e-3, atol=1e-5)
    for predicted, measured, low, high in (
        ("predicted", "measured", "low", "high"),
        ("common", "common_measured", "common_low", "common_high"),
    ):
        power = 2 if predicted == "predicted" else 1  # intervals are of squares
        ends = drawn[low] ** power, drawn[high] ** power
        assert (
            (drawn[predicted] ** power - drawn[measured] ** power).abs()
            < 1.0001 * (ends[1] - ends[0])
        ).all()
    found = cache_run.table("agreement").set_index("rule")
    assert found["inside"][RULES[1]] == found["layers"][RULES[1]] == 4
    assert found["apart"][RULES[1]] < 1e-4


def test_needles_stand_in_the_prefill_and_are_asked_for_behind_it() -> None:
    found = source(
        "llama",
        rules=RULES,
        splits=["uniform", "cut"],
        needles=2,
        sensitivity=True,
        depth=True,
        together=True,
    )
    words = found.loaded.tokenizer
    for number in range(2):
        needle = plant(found, number)
        told, asked, code = (
            words.decode(ids).replace(" ", "").replace("▁", " ").strip()
            for ids in (
                needle.ids[0, : found.prefill],
                needle.ids[0, found.prefill :],
                needle.answer,
            )
        )
        assert needle.tokens == found.prefill
        assert "secret code of" in told
        assert code in told
        assert asked.endswith(code)
        rows = torch.zeros(needle.ids.shape[1] - found.prefill, len(words))
        rows[torch.arange(len(rows) - 1), needle.ids[0, found.prefill + 1 :]] = 1.0
        text = Text(found, needle.ids, needle.tokens, {})
        said = text.outcome(type("Result", (), {"logits": rows[None]}))
        assert needle.found(said) == 1.0
        said.rows[-2] = -said.rows[-2]
        assert needle.found(said) == 0.0


@pytest.mark.parametrize(
    ("model", "readings"),
    [
        ("bert", {"cosine", "neighbour", "error"}),
        ("classifier", {"kl", "agreement", "error"}),
        ("gpt2", {"kl", "agreement", "loss", "error"}),
        ("llama", {"kl", "agreement", "loss", "error"}),
    ],
)
def test_every_query_keeps_a_few(model: str, readings: set[str], tmp_path: Path) -> None:
    """And its layers' errors at fixed inputs are as predicted, as above; heads draw keys of their
    own.
    """
    asked = spec(
        model,
        when="every",
        rules=["random", "topk", "impact"],
        window=40,
        together=True,
        sizes=[0.4, 0.7],
    )
    run = execute(asked, tmp_path / "run")
    fixed = run.table("fixed")
    assert len(fixed) == 3 * 2 * 2
    sure, drawn = fixed[fixed["draws"] == 1], fixed[fixed["draws"] > 1]
    assert np.allclose(sure["predicted"], sure["measured"], rtol=1e-3)
    assert set(drawn["rule"]) == {"random"}
    apart = (drawn["predicted"] ** 2 - drawn["measured"] ** 2).abs()
    assert (apart < 1.0001 * (drawn["high"] ** 2 - drawn["low"] ** 2)).all()
    found = run.table("downstream")
    assert set(found["reading"]) == readings
    error = found[(found["reading"] == "error") & (found["rule"] == "topk")]
    assert error["value"].is_monotonic_decreasing
    assert (error["value"] > 0).all()


def test_gpt2_goes_every_way_of_a_cache(tmp_path: Path) -> None:
    """Splits, needles, one head and one layer at a time, heads together; a rule of chances that
    differ from key to key too.
    """
    rules = [*RULES, "neyman:shared"]
    ways = {
        "splits": ["uniform", "cut"],
        "needles": 1,
        "sensitivity": True,
        "depth": True,
        "together": True,
    }
    run = execute(spec("gpt2", rules=rules, texts=1, sizes=[0.4, 0.7], **ways), tmp_path / "run")
    kl = run.table("downstream").query("reading == 'kl'")
    assert sorted(kl.groupby(["rule", "split"]).size().index) == sorted(
        [(rules[0], "uniform"), (rules[1], "cut"), (rules[1], "uniform"), (rules[2], "uniform")]
    )
    assert (kl["value"] > 0).all()
    assert {"needle", "q95"} < set(run.table("downstream")["reading"])
    assert (run.table("sensitivity")["kl"] > 0).all()
    assert set(run.table("propagation")["layer"]) == {-1, 0, 1}
    assert len(run.table("together")) == 2 * 2
    fixed = run.table("fixed")
    assert set(fixed["rule"]) == set(rules)
    assert ((fixed["predicted"] - fixed["measured"]).abs() < 0.5 * fixed["measured"]).all()


def test_a_killed_run_is_finished_by_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in the first unit that drops keys in one layer alone; a local Dask cluster does the
    rest, to the same bytes.
    """
    settings = {"texts": 1, "sensitivity": True, "depth": True}
    asked = spec("llama", rules=RULES[1:], **settings)
    path, out = tmp_path / "spec.yaml", tmp_path / "killed"
    path.write_text(yaml.safe_dump(asked.as_dict()), encoding="utf-8")
    code = (
        "import os, signal, sys, esscher.compress.job as job; from esscher.runs import"
        " execute\njob.layer_rows = lambda *arguments: os.kill(os.getpid(),"
        " signal.SIGKILL)\nexecute(sys.argv[1], sys.argv[2])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), str(out)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    whole = execute(asked, tmp_path / "whole")
    assert 1 <= Store(out).count() < whole.manifest.units
    assert load_run(out).status != "complete"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    resumed = execute(asked, out, dask="local", workers=1)
    assert len(resumed.manifest.starts) == 2
    assert resumed.manifest.starts[1].executor.startswith("dask")
    assert {"draws", "downstream", "layers", "depth", "sensitivity", "propagation"} <= set(
        resumed.tables
    )
    for name in set(whole.tables) | set(resumed.tables):
        assert (out / f"{name}.parquet").read_bytes() == (
            whole.path / f"{name}.parquet"
        ).read_bytes(), name


def test_a_unit_depends_on_nothing_that_was_computed_before(cache_run: Run) -> None:
    asked = DownstreamSpec.read(dict(cache_run.spec))
    draws = cache_run.table("draws")
    for unit, reading in (({"text": 1}, "kl"), ({"needle": 0}, "needle")):
        rows = [
            row for row in DOWNSTREAM.compute(asked, unit)["draws"] if row["reading"] == reading
        ]
        own = draws[(draws["text"] == rows[0]["text"]) & (draws["reading"] == reading)]
        assert own["value"].tolist() == [row["value"] for row in rows]


@pytest.mark.slow
def test_processes_give_the_same_bytes(cache_run: Run, tmp_path: Path) -> None:
    asked = DownstreamSpec.read(dict(cache_run.spec))
    several = execute(asked, tmp_path / "several", workers=2)
    for name in cache_run.tables:
        assert (several.path / f"{name}.parquet").read_bytes() == (
            cache_run.path / f"{name}.parquet"
        ).read_bytes(), name


def test_only_some_layers_drop(tmp_path: Path) -> None:
    run = execute(
        spec("llama", rules=["sinks:2+recent"], layers=[1], heads=[0, 3], texts=1), tmp_path / "run"
    )
    layers = run.table("layers")
    assert (layers.loc[layers["layer"] == 0, "fixed"] == 0).all()
    assert (layers.loc[layers["layer"] == 1, "fixed"] > 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "bert", "when": "cache"}, "no language model, so that no cache is decoded from"),
        ({"model": "bert", "needles": 2}, "needles: it is of a cache"),
        ({"model": "llama", "layers": [7]}, "layers: .* has layers 0 to 1, got 7"),
        ({"model": "llama", "texts": 500}, "texts: the corpus fills"),
        ({"model": "llama", "window": 300}, "window: .* takes at most 128 positions"),
        (
            {"model": "llama", "splits": ["budget"]},
            "the split budget and a probe's run go together",
        ),
        (
            {"model": "llama", "rules": ["recent:4"]},
            "expected rules with one part that has no number",
        ),
        ({"model": "llama", "sizes": [1.5]}, "expected shares above 0 and below 1"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(DOWNSTREAM.units(spec(**settings)))
