"""Paired training, softmax and linear on the same prompts: time of a step over that of the plain
PyTorch loop.

The plain loop draws fresh prompts, uses autograd and torch.optim.SGD, and trains one model at a
time; its two models' times are added. Settings of [S], appendix A: d = 5, batches of 128. The plain
loop is timed with one thread and with all of them, and the faster counts; ours has one.
"""

from __future__ import annotations

from functools import partial

import torch
from ratio import best_times, ratio_line

from esscher.icl import LinearTask
from esscher.icl.specs import TrainSpec
from esscher.icl.training import Pair

BATCH, DIM, RATE = 128, 5, 1e-3
# by length: our steps, those of the plain loop
STEPS = {10: (100, 40), 100: (50, 20), 1000: (20, 4)}


class Plain(torch.nn.Module):
    """One attention layer as its paper writes it: O, V, K, Q without biases."""

    def __init__(self, size: int, softmax: bool) -> None:
        super().__init__()
        self.O, self.V, self.K, self.Q = (torch.nn.Linear(size, size, bias=False) for _ in range(4))
        self.softmax = softmax

    def forward(self, tokens: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        scores = (self.K(tokens) @ self.Q(query)[:, :, None])[..., 0]
        weights = scores.softmax(-1) if self.softmax else scores / tokens.shape[1]
        return self.O((weights[:, None] @ self.V(tokens))[:, 0])[:, -1]


def plain_steps(task: LinearTask, length: int, steps: int, threads: int) -> None:
    """Both models, one after the other, each on prompts of its own."""
    torch.set_num_threads(threads)
    for softmax in (True, False):
        generator = torch.Generator().manual_seed(0)
        model = Plain(DIM + 1, softmax)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(steps):
            prompts = task.sample(BATCH, length, generator)
            tokens, query = prompts.tokens.float(), prompts.query_token.float()
            loss = ((model(tokens, query) - prompts.target.float()) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def our_steps(pair: Pair, steps: int) -> None:
    torch.set_num_threads(1)
    pair.advance(steps)


def main() -> list[str]:
    lines = []
    task, threads = LinearTask.isotropic(DIM), torch.get_num_threads()
    for length, (ours_steps, steps) in STEPS.items():
        pair = Pair(task, length, TrainSpec(steps=10**6, batch=BATCH, rate=RATE))
        works = [partial(our_steps, pair, ours_steps)]
        works += [partial(plain_steps, task, length, steps, count) for count in (1, threads)]
        ours, one, all_threads = best_times(*works, repeats=4)
        ours, theirs = ours / ours_steps, min(one, all_threads) / steps
        name = f"paired SGD step, L = {length} ({1 / ours:.0f} against {1 / theirs:.0f} steps/s)"
        lines.append(ratio_line(name, ours / theirs, 0.5))
    torch.set_num_threads(threads)
    return lines


if __name__ == "__main__":
    print("\n".join(main()))
