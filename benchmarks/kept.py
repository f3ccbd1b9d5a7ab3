"""attend on the keys that a window keeps, against dense attention on the same tokens: time, memory,
and that both agree.

Dense is PyTorch's fused kernel, once causal and once under the window's mask. Causal dense needs no
memory but its output, and gives another answer; what gives the window's answer needs the mask, so
that memory is measured against it.
"""

from __future__ import annotations

import subprocess
import sys

import torch
from ratio import best_times, ratio_line
from torch.nn.functional import scaled_dot_product_attention

import esscher as es

TOKENS, WIDTH, WINDOW = 16_384, 64, 512

MEMORY_PROBE = f"""
import psutil, sys, threading, time, torch, esscher as es
from torch.nn.functional import scaled_dot_product_attention
torch.set_num_threads(2)

def resident():
    return psutil.Process().memory_info().rss / 2**20

def watch():
    while not done:
        peak.append(resident())
        time.sleep(0.0005)

def window(n):
    return es.attend(q[:n], k[:n], v[:n], keep="window:{WINDOW}", positions=torch.arange(n))

def masked(n):
    mask = torch.ones(n, n, dtype=torch.bool).tril_().triu_(-{WINDOW})
    return scaled_dot_product_attention(*(x[None, None, :n] for x in (q, k, v)), attn_mask=mask)

def causal(n):
    return scaled_dot_product_attention(*(x[None, None, :n] for x in (q, k, v)), is_causal=True)

work = dict(window=window, masked=masked, causal=causal)[sys.argv[1]]
q, k, v = (torch.randn({TOKENS}, {WIDTH}) for _ in range(3))
work(1024)
done, peak, before = [], [], resident()
watcher = threading.Thread(target=watch)
watcher.start()
answer = work({TOKENS})
peak.append(resident())
done.append(True)
watcher.join()
print(max(peak) - before)
"""


def main() -> list[str]:
    return [*_time(), _memory()]


def _time() -> list[str]:
    q, k, v = (torch.randn(TOKENS, WIDTH) for _ in range(3))
    four = [x[None, None] for x in (q, k, v)]
    places = torch.arange(TOKENS)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril_().triu_(-WINDOW)

    def window() -> torch.Tensor:
        return es.attend(q, k, v, keep=f"window:{WINDOW}", positions=places)

    def masked() -> torch.Tensor:
        return scaled_dot_product_attention(*four, attn_mask=mask)[0, 0]

    assert float((window() - masked()).abs().max()) < 1e-5
    ours, causal = best_times(
        window, lambda: scaled_dot_product_attention(*four, is_causal=True), repeats=15
    )
    again, dense = best_times(window, masked, repeats=3)
    return [
        ratio_line("attend, window 512 of 16,384 / causal dense attention", ours / causal, 1 / 8),
        ratio_line("  / dense attention under the window's mask", again / dense, 1 / 8),
    ]


def _memory() -> str:
    ours, dense = (_peak(name) for name in ("window", "masked"))
    return ratio_line("  in memory above inputs, mask included", ours / dense, 1 / 8)


def _peak(name: str) -> float:
    answer = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, name], capture_output=True, text=True, check=True
    )
    return float(answer.stdout)


if __name__ == "__main__":
    print("\n".join(main()))
