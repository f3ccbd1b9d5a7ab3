"""gaussian_error: pairs per second, and its time over that of a plain numpy quadrature on 200 x 400
fixed nodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from ratio import best_times, ratio_line

from esscher.errors.gaussian import gaussian_error

Floats = npt.NDArray[np.float64]
PAIRS = 500


def main() -> list[str]:
    random = np.random.default_rng(1)
    counts = np.floor(10 ** random.uniform(0, 15, 10_000))
    scores = random.uniform(0, 40, counts.size)
    some = slice(0, PAIRS)
    everything, ours, plain = best_times(
        lambda: gaussian_error(counts, scores),
        lambda: gaussian_error(counts[some], scores[some]),
        lambda: [_plain(n, s) for n, s in zip(counts[some], scores[some], strict=True)],
        repeats=5,
    )
    rate = counts.size / everything
    name = f"gaussian_error / numpy 200 x 400 ({rate:.0f} pairs/s)"
    ladder, apart = best_times(
        lambda: gaussian_error(np.logspace(0, 12, 13).round()[:, None], scores[:100]),
        lambda: gaussian_error(counts[:1300], scores[:1300]),
        repeats=5,
    )
    return [
        ratio_line(name, ours / plain, 0.2),
        ratio_line("gaussian_error, 13 n on 100 s / 1300 pairs", ladder / apart, 0.6),
    ]


def _plain(n: float, s: float) -> tuple[float, float]:
    """The Laplace integrals as they stand on fixed grids, 400 nodes g and 200 nodes log t: good for
    moderate s.
    """
    g = np.linspace(-10, 13, 400)
    weight = np.exp(-0.5 * g * g) / np.sqrt(2 * np.pi) * (g[1] - g[0])
    freezing = np.sqrt(2 * np.log(n))
    low = (
        min(-np.log(n) - s * s / 2 - 20, -(freezing + 5) * s)
        if s < freezing
        else -(freezing + 5) * s - 5
    )
    tau = np.linspace(low, (9 if n < 10 else 4) * s + 4, 200)
    y = np.exp(np.minimum(tau[:, None] + s * g, 6.0))  # exp(-y) is 0 from there on
    decay = np.exp(-y)
    once, twice = y * decay, y * y * decay
    log_phi = np.log1p(np.expm1(-y) @ weight)
    one = n * np.exp((n - 1) * log_phi) * (tau[1] - tau[0])
    two = n * (n - 1) * np.exp((n - 2) * log_phi) * (tau[1] - tau[0])
    f1 = one @ (twice @ (weight * (g - s) ** 2)) + two @ (once @ (weight * (g - s))) ** 2
    return float(f1), float(one @ (twice @ weight))


if __name__ == "__main__":
    print("\n".join(main()))
