"""Attention: streaming against the fused kernel it is built on, nested prefixes against one softmax
per size, memory.
"""

from __future__ import annotations

import subprocess
import sys

import torch
from ratio import best_times, ratio_line

import esscher as es

MEMORY_PROBE = """
import psutil, threading, time, torch, esscher as es
torch.set_num_threads(2)

def resident():
    return psutil.Process().memory_info().rss / 2**20

def watch():
    while not done:
        peak.append(resident())
        time.sleep(0.002)

q, k, v = torch.randn(512, 64), torch.randn(1_000_000, 64), torch.randn(1_000_000, 64)
es.attend(q[:8], k[:4096], v[:4096])
done, peak, before = [], [], resident()
watcher = threading.Thread(target=watch)
watcher.start()
es.attend(q, k, v)
done.append(True)
watcher.join()
print(max(peak) - before)
"""


def main() -> list[str]:
    return [_attend(), _prefixes(), _memory()]


def _attend() -> str:
    q, k, v = (torch.randn(8192, 64) for _ in range(3))
    four = [x[None, None] for x in (q, k, v)]
    ours, fused = best_times(
        lambda: es.attend(q, k, v), lambda: torch.nn.functional.scaled_dot_product_attention(*four)
    )
    return ratio_line("attend / fused attention, n = 8192, k = 64", ours / fused, 1.3)


def _prefixes() -> str:
    sizes = torch.logspace(3, torch.log10(torch.tensor(8690.0)), 8).round().long().tolist()
    tokens = torch.randn(8690, 50)
    explicit_moments = []

    def explicit() -> None:
        explicit_moments.clear()
        for n in sizes:
            x = tokens[:n]
            outputs = (x @ x.T / 50**0.5).softmax(-1) @ x
            explicit_moments.append((outputs.mean(0), torch.cov(outputs.T, correction=0)))

    ours, plain = best_times(
        lambda: es.attend_prefixes(tokens, tokens, tokens, sizes), explicit, repeats=5
    )
    explicit()
    for found, expected in zip(
        es.attend_prefixes(tokens, tokens, tokens, sizes), explicit_moments, strict=True
    ):
        for own, other in zip(found, expected, strict=True):
            assert float((own - other).abs().max()) < 1e-6
    return ratio_line("nested prefixes / one explicit softmax per size", ours / plain, 1 / 8)


def _memory() -> str:
    answer = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE], capture_output=True, text=True, check=True
    )
    return ratio_line(
        "attend, 1,000,000 keys: MB above inputs / 300", float(answer.stdout) / 300, 1.0
    )
