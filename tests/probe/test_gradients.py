"""What next tokens feel of each head, as a column of a probe; and W_O for rules that ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.hf.gradients import DRAWS
from esscher.probe.statistics.frontier import window_metric
from esscher.runs import Run
from tests.models.probe_runs import few_texts, save_tiny, source, tiny_model

SMALL: dict[str, Any] = {
    **{
        "max_tokens": 400,
        "window": 64,
        "queries": 48,
        "kept_queries": 8,
        "n": "16,32,48",
        "pool": "sequence",
    },
    "rules": ("random", "sinks:2+recent", "impact"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = tmp_path_factory.mktemp("gradients")
    return es.probe(str(save_tiny(made / "llama", "llama")), few_texts(), out=made / "run", **SMALL)


def by_hand(model: Any, ids: torch.Tensor, places: int, seed: int) -> list[torch.Tensor]:
    """Mean squared gradients (heads,) of every layer: no cache, no capture; taps before each output
    projection.
    """
    heads, taps = model.config.num_attention_heads, []

    def tap(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        taps.append(torch.zeros(places, args[0].shape[2], requires_grad=True))
        return (
            args[0] + torch.nn.functional.pad(taps[-1], (0, 0, args[0].shape[1] - places, 0))[None],
        )

    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(tap) for layer in model.model.layers]
    logp = model(input_ids=ids).logits[0, -places:].double().log_softmax(-1)
    for hook in hooks:
        hook.remove()
    generator, squares = torch.Generator().manual_seed(seed), [torch.zeros(heads) for _ in taps]
    for _ in range(DRAWS):
        u = torch.rand(places, 1, generator=generator, dtype=torch.float64)
        drawn = (logp.detach().exp().cumsum(-1) < u).sum(1, keepdim=True)
        found = torch.autograd.grad(logp.gather(1, drawn).sum(), taps, retain_graph=True)
        for square, one in zip(squares, found, strict=True):
            square += one.view(places, heads, -1).square().mean((0, 2)) / DRAWS
    return squares


def test_gradients_are_those_of_the_model(llama: Run) -> None:
    found = source(llama)
    wanted: dict[tuple[int, int], list[float]] = {}
    for window in sorted(found.rule_windows):
        ids = torch.from_numpy(
            found.windows.ids[window][~found.windows.padding[window]].astype(np.int64)
        )[None]
        squares = by_hand(
            found.loaded.model, ids, ids.shape[1] // 4, found.spec.unit_seed({"window": window})
        )
        for layer, own in enumerate(squares):
            for head, square in enumerate(own.tolist()):
                wanted.setdefault((layer, head), []).append(square)
    known = llama.table("heads").set_index(["layer", "head"])["gradient"].to_dict()
    assert known.keys() == wanted.keys()
    for place, value in known.items():
        assert value == pytest.approx(np.mean(wanted[place]) ** 0.5, rel=1e-4)


def test_models_without_next_tokens_have_none(tmp_path: Path) -> None:
    """An encoder in its own contexts, and a causal model that comes without its head."""
    model, words = tiny_model("llama")
    for name, network in {"encoder": tiny_model("bert")[0], "headless": model.model}.items():
        run = es.probe(
            network,
            few_texts(),
            tokenizer=words,
            out=tmp_path / name,
            **{**SMALL, "layers": (0,), "heads": (1,)},
        )
        assert window_metric(source(run), 0) is None
        assert run.table("heads")["gradient"].isna().all()
        with pytest.raises(ValueError, match="the model has no language head, or cannot continue"):
            run.budget(kl=0.05)
        assert np.isfinite(run.table("budget")["keys"]).all()


def test_impact_is_measured_behind_the_output(llama: Run) -> None:
    """Keys that impact keeps of a window, from W_O read off the model's own weights, have the error
    that the probe stores.
    """
    found = source(llama)
    (window, *rest) = sorted(found.rule_windows)
    assert not rest
    layer, kv = found.loaded.model.model.layers[1].self_attn, 1
    width, per = found.loaded.shapes[1].width, found.loaded.heads // found.loaded.kv_heads
    into = (
        layer.o_proj.weight.detach()
        .T.reshape(-1, width, found.loaded.hidden_size)[kv * per : (kv + 1) * per]
        .double()
    )
    seen: dict[int, Any] = {}
    found.run(np.array([window]), (1,), lambda captured, batch: seen.update({1: captured}))
    asked, captured = found.rule_queries(window), seen[1]
    cut = asked.cut
    assert cut is not None
    k, v = captured.key[0, kv].double(), captured.value[0, kv].double()

    def weights(at: np.ndarray, i: int) -> torch.Tensor:
        scores = captured.query[0, kv * per + i, at].double() @ k.T * captured.scale
        visible = torch.arange(len(k)) <= torch.from_numpy(at)[:, None]
        return scores.masked_fill(~visible, -torch.inf).softmax(1)

    pi = [weights(asked.judged, i) for i in range(per)]
    limit, impact = [one @ v for one in pi], torch.zeros(cut, dtype=torch.float64)
    for i in range(per):  # queries before the cut choose among the keys there
        chose = weights(asked.choosing, i)[:, :cut]
        moved = (v[None, :cut] - (chose @ v[:cut])[:, None]) @ into[i]
        impact += (chose / (1 - chose) * moved.norm(dim=2)).square().sum(0)
    rows = llama.table("frontier").query("layer == 1 and rule == 'impact' and share == 0.25")
    kept = torch.cat([impact.topk(round(0.25 * cut)).indices, torch.arange(cut, len(k))])
    for i in range(per):
        left = torch.zeros_like(pi[i])
        left[:, kept] = pi[i][:, kept]
        rms = float(
            ((left / left.sum(1, keepdim=True)) @ v - limit[i]).square().sum(1).mean().sqrt()
        )
        assert rms == pytest.approx(
            float(rows[rows["head"] == kv * per + i]["rms"].iloc[0]), rel=1e-4
        )
