"""Every architecture through capture, probe and compression: one attention call has the scores, and
each number is compared with the model's own output or with all subsets of its keys.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.compress.per_query import PerQueryText
from esscher.compress.session import Source, source_of
from esscher.compress.spec import CompressSpec
from esscher.compress.text import Text
from esscher.errors.keep_curve import KeepErrors
from esscher.hf.call import AttentionCall
from esscher.hf.capture import forward
from esscher.hf.interventions import intervene, rule_for_every_query, with_kept
from esscher.keep import parse
from esscher.probe.session import RuleQueries
from esscher.probe.spec import kept_sizes
from esscher.probe.statistics.frontier import compare_rules
from tests.models.probe_runs import few_texts, whole_prose
from tests.models.probe_runs import source as probe_source
from tests.models.tiny import FAMILIES, GROUPED, Family, build
from tests.models.tokenizers_for_tests import tokenizer
from tests.probe.test_own_output import own_outputs, probe_difference

DEEPSEEK = {
    **{key: value for key, value in GROUPED.items() if key != "head_dim"},
    **{"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4},
    **{"qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 2},
    **{"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
}
TABLE = {family.name: family for family in FAMILIES} | {
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3Config", DEEPSEEK, width=6)
}
CAUSAL = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2", "qwen2")
NAMES = (*CAUSAL, "qwen3", "phi3", "opt", "bert", "modernbert", "bart", "t5")
TOKENS = 9
RULE = "sinks:2+random"


@functools.cache
def whole_model(name: str, window: int | None = None) -> Any:
    """A random model that knows the tokens of a tiny tokenizer; ``window``: of sliding layers."""
    family = TABLE[name]
    options = {**family.options, "vocab_size": len(tokenizer("llama"))}
    if window is not None:
        wide = {"sliding_window": window, "local_attention": 2 * window}
        options |= {key: value for key, value in wide.items() if key in options}
    model = build(family.config, options, "AutoModelForCausalLM" if name in CAUSAL else "AutoModel")
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if part.endswith("sinks"):
                parameter.add_(2.0)  # a third of the weight of a few keys
    return model


def model_of(name: str, window: int | None = None) -> Any:
    """Of an encoder and a decoder the encoder alone."""
    model = whole_model(name, window)
    return model.get_encoder() if name in ("bart", "t5") else model


def calls_of(name: str) -> tuple[list[AttentionCall], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Attention calls on a few tokens, and what the model's own modules give, by plain hooks."""
    ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    inputs, calls = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, []
    forward(model_of(name), inputs, calls.append)
    return calls, own_outputs(model_of(name), inputs, name, calls[0].heads), inputs


@pytest.mark.parametrize("name", NAMES)
def test_output_and_weights_are_the_models_own(name: str) -> None:
    calls, own, _ = calls_of(name)
    assert len(calls) == len(own)
    at = torch.tensor([5, 0, 8])
    for call, theirs in zip(calls, own, strict=True):
        size = float(theirs.abs().max())
        value = call.value.repeat_interleave(call.shared, dim=1)
        for found, expected in (
            (call.output(), theirs),
            (call.output(at), theirs[:, :, at]),
            (call.weights() @ value, theirs),
            (call.weights(at) @ value, theirs[:, :, at]),
        ):
            assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, size)
        lost = torch.zeros(call.query.shape[:3], dtype=torch.float64)
        if call.sinks is not None:
            sink = call.sinks.double().exp()[:, None]
            lost = sink / (sink + call.scores().double().exp().sum(-1))
            assert float(lost.max()) > 0.3
        torch.testing.assert_close(1 - call.weights().double().sum(-1), lost, rtol=0, atol=1e-6)
        few = slice(1, 3)
        torch.testing.assert_close(call.scores(at, few), call.scores()[:, few][:, :, at])


def test_the_table_has_every_part_of_a_call() -> None:
    seen = {name: calls_of(name)[0] for name in NAMES}
    having = {
        "groups": {name for name in NAMES if seen[name][0].shared > 1},
        "window": {name for name in NAMES if any(call.window for call in seen[name])},
        "cap": {name for name in NAMES if seen[name][0].softcap},
        "bias": {name for name in NAMES if seen[name][0].bias is not None},
        "sink": {name for name in NAMES if seen[name][0].sinks is not None},
        "width": {n for n in NAMES if seen[n][0].key.shape[-1] != seen[n][0].value.shape[-1]},
    }
    assert having["cap"] == {"gemma2"}
    assert having["bias"] == {"t5"}
    assert having["sink"] == {"gpt_oss"}
    assert having["width"] == {"deepseek_v3"}
    assert {"mistral", "gemma2", "gemma3_text", "gpt_oss", "modernbert"} <= having["window"]
    assert {"llama", "mistral", "gemma2", "gpt_oss", "qwen2"} <= having["groups"]


# ---- the error of dropping keys
# ------------------------------------------------------------------------------------------


def by_subsets(call: AttentionCall, row: int, chance: torch.Tensor) -> torch.Tensor:
    """(heads,): E |output - limit|^2 of a query over all subsets of its keys, through the call."""
    subsets = torch.tensor(list(itertools.product([False, True], repeat=TOKENS)))
    one = replace(call.take(torch.tensor([row]), 0), hidden=None)
    seen = one.visible(torch.tensor([0]))[:, :, 0]  # (1, heads or 1, keys)
    left = seen & subsets[:, None]
    size = len(subsets)
    many = replace(
        one,
        query=one.query.expand(size, -1, -1, -1),
        key=one.key.expand(size, -1, -1, -1),
        value=one.value.expand(size, -1, -1, -1),
        mask=left[:, :, None],
        bias=None if one.bias is None else one.bias.expand(size, -1, -1, -1),
    )
    error = (many.output() - one.output())[:, :, 0].double()
    if call.sinks is None:  # attention on nothing is no output, and no error is counted
        error = error * left.any(-1)[..., None]
    weight = torch.where(subsets, chance, 1 - chance).double().prod(1)  # (subsets,)
    return (weight[:, None] * error.square().sum(-1)).sum(0)


@pytest.mark.parametrize("name", NAMES)
def test_predicted_errors_are_those_of_all_subsets(name: str) -> None:
    """Each key kept with its own probability, or surely, as rules have it; at the full model's
    inputs.
    """
    calls, _, _ = calls_of(name)
    for call, text in itertools.product(calls, ("random:0.4", "sinks:2+random:0.6", "random:0.9")):
        rule = parse(text)
        for kv, row in itertools.product(range(call.kv_heads), (4, 8)):
            context = call.context(kv, torch.tensor([row]))
            found = KeepErrors(context).curve(rule)
            chance = rule.include(context).probability[0]
            assert len(chance) == TOKENS
            assert found.queries is not None
            own = slice(kv * call.shared, (kv + 1) * call.shared)
            expected = by_subsets(call, row, chance)[own].numpy()
            np.testing.assert_allclose(found.queries.mse[:, 0], expected, rtol=2e-4, atol=1e-10)


@pytest.mark.parametrize("rule", ["topk", "heavy", "sinks:2+recent", "recent:2+impact"])
@pytest.mark.parametrize("name", NAMES)
def test_dropped_keys_cost_what_is_predicted(name: str, rule: str) -> None:
    """Every query of every call keeps 4 keys: the attention call on these, and the prediction."""
    calls, _, _ = calls_of(name)
    decide = rule_for_every_query(parse(rule), lambda *_: 4, torch.Generator().manual_seed(0))
    rows = torch.arange(TOKENS)
    for call in calls:
        kept = decide(call)
        assert kept is not None
        measured = (with_kept(call, kept).output() - call.output())[0].square().sum(-1)
        for kv in range(call.kv_heads):
            errors = KeepErrors(call.context(kv, rows)).curve(parse(rule), [4])
            assert errors.queries is not None
            own = measured[kv * call.shared : (kv + 1) * call.shared].flatten()
            np.testing.assert_allclose(errors.queries.mse[:, 0], own, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_everything_kept_is_the_full_model(name: str) -> None:
    _, _, inputs = calls_of(name)
    model = model_of(name)
    keep_all = rule_for_every_query(
        parse("random"), lambda layer, kv, keys: keys, torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        full = model(**inputs)[0]
        with intervene(model, keep_all):
            kept = model(**inputs)[0]
    torch.testing.assert_close(kept, full, rtol=1e-5, atol=1e-5)


# ---- the probe
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_probes_limits_are_the_models_outputs(name: str, tmp_path: Path) -> None:
    settings = {
        **{"max_tokens": 60, "window": 40, "queries": 3, "kept_queries": 2, "n": "16"},
        **{"heads": (0, 3), "rules": ("topk", "sinks:2+recent", "random")},
    }
    model = model_of(name, 24)
    run = es.probe(
        model,
        few_texts(),
        tokenizer=tokenizer("llama"),
        out=tmp_path,
        pool="sequence",
        **settings,
    )
    heads = run.table("heads")
    assert set(heads["status"]) == {"ok"}
    assert (heads["output_difference"] < 1e-5).all()
    assert probe_difference(run, model, name) <= 1e-5


# ---- compression
# ------------------------------------------------------------------------------------------


def source(name: str, folder: Path, **settings: Any) -> Source:
    whole_model(name, 40).save_pretrained(folder / "model")
    tokenizer("llama").save_pretrained(folder / "model")
    (folder / "text.txt").write_text(whole_prose()[:12000], "utf-8")
    fields = {
        **{"texts": 1, "window": 48, "decode": 8, "observe": 8, "draws": 1, "keep": [0.3, 0.6]},
        **{"model": str(folder / "model"), "corpus": {"text": [str(folder / "text.txt")]}},
    }
    return source_of(CompressSpec.read({**fields, **settings}))


@pytest.mark.parametrize("name", [name for name in NAMES if name in CAUSAL])
def test_errors_of_heads_are_the_models_own(name: str, tmp_path: Path) -> None:
    """Outputs on the kept keys, with every layer handed on as the full model has it: the running
    model's less the full one's are the errors that losses are predicted from.
    """
    found = source(name, tmp_path, rules=[RULE, "sinks:2+recent:2+heavy"], when="cache")
    text = Text(found, found.ids(int(found.texts[0])), found.prefill)
    for cell in text.cells():
        choice = text.choice(cell)
        measured = {}

        def hand_on(
            call: AttentionCall, measured: dict[int, torch.Tensor] = measured
        ) -> torch.Tensor:
            out, full = call.output(), text.limits[call.layer]
            measured[call.layer] = out[0] - full
            return full[None].to(out.dtype)

        text.decode(lambda call, choice=choice: text.left(choice, call), attend=hand_on)
        for layer, error in text.errors(choice).items():
            torch.testing.assert_close(error, measured[layer], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CAUSAL])
def test_every_query_keeps_a_few(name: str, tmp_path: Path) -> None:
    # shares of the most keys that a query sees: below 1/2, where a causal query sees half of them
    found = source(name, tmp_path, rules=[RULE, "topk"], when="every", keep=[0.2, 0.4])
    text = PerQueryText(found, int(found.texts[0]))
    for cell in text.cells():
        kept, outcome = text.run(cell)
        assert 0 < kept < text.keys
        assert not torch.equal(outcome.rows, text.full.rows)


# ---- a sink logit is no key
# ------------------------------------------------------------------------------------------


def beside_sink(scores: torch.Tensor, v: torch.Tensor, sink: float) -> torch.Tensor:
    """Attention of one query on keys, and on a logit of value 0."""
    e = scores.double().exp()
    return e @ v.double() / (e.sum() + np.exp(sink))


def test_a_window_never_drops_the_sink_logit() -> None:
    """Keys that places or scores choose, as many as the ladder says, and the logit with them."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 20, 4, generator=generator) for _ in range(3))
    sinks = torch.tensor([1.5, 3.0])
    asked = RuleQueries(choosing=np.array([5]), judged=np.array([12, 19]), cut=None)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    call = AttentionCall(0, "", q[None], k[None, :1], v[None, :1], 0.5, mask, sinks=sinks)
    scores, rules = call.scores()[0], [parse("sinks:4+recent"), parse("topk")]
    by_head = compare_rules(call, asked, 0, rules)
    for head in range(2):
        found = by_head[head]
        assert found["keys"].tolist() == [13, 20]
        for i, row in enumerate((12, 19)):
            own, sink = scores[head, row, : row + 1], float(sinks[head])
            limit = beside_sink(own, v[0, : row + 1], sink)
            assert float(found["limit"][i]) == pytest.approx(float(limit.square().sum()), rel=1e-5)
            for place, n in enumerate(kept_sizes(20).tolist()):
                first = [0, 1, 2, 3, *range(max(4, row + 1 - (n - 4)), row + 1)]
                for r, keys in enumerate((first, own.argsort(descending=True)[:n].tolist())):
                    if r == 1 or n > 4:
                        error = beside_sink(own[keys], v[0, keys], sink) - limit
                        expected = float(error.square().sum())
                        assert float(found["mse"][i, r, place]) == pytest.approx(
                            expected, rel=1e-5, abs=1e-7
                        )


def test_a_probe_does_not_count_the_sink_logit(tmp_path: Path) -> None:
    settings = {
        **{"max_tokens": 200, "window": 64, "positions": (63,), "queries": 4, "kept_queries": 4},
        **{"n": "16,64", "layers": (1,), "heads": (1,), "rules": ("sinks:4+recent", "topk")},
    }
    words = tokenizer("llama")
    run = es.probe(
        model_of("gpt_oss", 24),
        few_texts(),
        tokenizer=words,
        out=tmp_path,
        pool="sequence",
        **settings,
    )
    (row,) = run.table("heads").to_dict("records")
    assert row["status"] == "ok"
    assert row["n_keys"] == row["n_keys_most"] == 64
    context = probe_source(run)
    cuts = {context.rule_queries(window).cut for window in context.rule_windows}
    assert set(run.table("frontier")["keys"]) == cuts
