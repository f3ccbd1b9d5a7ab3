"""A first look: for a few laws of tokens and one head at three scales, the limit, the horizon and
the exact error.

``python examples/first_look.py``. The last column is one draw of tokens, to compare with the exact
error at the same n.
"""

from __future__ import annotations

import torch

import esscher as es

DIM = 8
QUERIES = 16
N_DRAWN = 10**4
POWERS = (2, 4, 6, 9)  # n = 10^2, 10^4, ...
SCALES = (0.5, 1.0, 2.0)


def laws(generator: torch.Generator) -> dict[str, es.Measure]:
    """Three laws of about the same size, the last a finite pool of clustered tokens."""
    eye = torch.eye(DIM, dtype=torch.float64)
    centres = torch.randn(4, DIM, dtype=torch.float64, generator=generator) * 0.8
    clusters = es.Mixture([0.25] * 4, [es.Gaussian(0.2 * eye, centre) for centre in centres])
    return {
        "Gaussian, covariance 1": es.Gaussian(eye),
        "sphere of radius sqrt(8)": es.Sphere(DIM, radius=DIM**0.5),
        "pool of 2000 in 4 clusters": es.Pool(clusters.sample(2_000, generator)),
    }


def one_draw(head: es.Head, law: es.Measure, x: torch.Tensor, generator: torch.Generator) -> float:
    """Root mean square error over the queries of attention on one draw of tokens."""
    tokens = law.sample(N_DRAWN, generator)
    out = es.attend(head.tilt(x), tokens, tokens @ head.V.T, scale=1.0)
    return float((out - es.limit(head, law)(x)).square().sum(-1).mean().sqrt())


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = torch.randn(DIM, DIM, dtype=torch.float64, generator=generator) / DIM**0.5
    head = es.Head(
        A=shape / torch.linalg.matrix_norm(shape, ord=2), V=torch.eye(DIM, dtype=torch.float64)
    )
    columns = "".join(f"{f'n = 10^{power}':>12}" for power in POWERS)
    print(
        f"Root mean square error of attention on n tokens against infinitely many, over {QUERIES}"
        " queries of the law."
    )
    print(
        "The head's scores are multiplied by 0.5, 1 and 2: the horizon grows, and more tokens are"
        " needed.\n"
    )
    print(f"{'law':<28}{'horizon':>8}{'|limit|':>9}{columns}{'a draw, n = 10^4':>19}")
    for name, law in laws(generator).items():
        x = law.sample(QUERIES, generator)
        for scale in SCALES:
            scaled = head.scaled(scale)
            size = float(es.limit(scaled, law)(x).square().sum(-1).mean().sqrt())
            curve = es.exact_curve(scaled, law, x, [10**power for power in POWERS])
            errors = "".join(f"{error:>12.5f}" for error in curve.rms)
            drawn = one_draw(scaled, law, x, generator)
            print(f"{name:<28}{scaled.horizon(law):>8.2f}{size:>9.3f}{errors}{drawn:>19.5f}")
        print()


if __name__ == "__main__":
    main()
