"""Where a head, a law or a curve is expected, anything else is refused by name: a ValueError, never
an AttributeError.
"""

from __future__ import annotations

import subprocess
import sys

# Outside of pytest, whose type checks would answer first.
PROGRAM = """
import numpy as np, torch, esscher as es
head, law, x = es.Head([[1.0]], [[1.0]]), es.Gaussian([[1.0]]), [[1.0]]
curve = es.ErrorCurve(n=np.array([1, 2]), rms=np.array([1.0, 0.5]), kind="exact", scale=1.0)
calls = {
    "head": [lambda y: es.limit(y, law), lambda y: es.linear_limit(y, law), lambda y: es.hardmax_limit(y, law),
             lambda y: es.exact_curve(y, law, x, 3), lambda y: es.predictions(y, law),
             lambda y: es.delta_covariance(y, law, x), lambda y: es.converge(y, law, [3], 2)],
    "measure": [lambda y: es.limit(head, y), lambda y: head.horizon(y), lambda y: head.coupling(y),
                lambda y: es.exact_curve(head, y, x, 3), lambda y: es.predictions(head, y),
                lambda y: es.delta_covariance(head, y, x), lambda y: es.converge(head, y, [3], 2)],
    "curve": [lambda y: es.fit_rate(y), lambda y: es.tokens_needed(y, 0.1)],
    "components": [lambda y: es.Mixture([1.0], y), lambda y: es.Mixture([1.0], [y])],
    "level": [lambda y: es.confidence_region([[1.0]], [[1.0], [2.0]], [[1.0], [2.0]], level=y)],
    "metrics": [lambda y: es.converge(head, law, [3], 2, metrics=y)],
}
for name, functions in calls.items():
    for i, function in enumerate(functions):
        for junk in ("text", 3, None, {}, object()):
            try:
                function(junk)
            except ValueError as refusal:
                assert str(refusal).startswith(name + ":"), (name, i, junk, refusal)
            else:
                raise AssertionError((name, i, junk))
# given queries inside the strip suffice: no token is a query then
es.converge(es.Head([[1.0]], [[1.0]]), es.Laplace(1), [2], 2, metrics=("l2",), queries=[[0.1]])
# what requires a gradient is read as numbers
grad = torch.eye(1, dtype=torch.float64).requires_grad_()
for law in (es.Gaussian(grad), es.Sphere(1), es.Pool(grad), es.Mixture([1.0], [es.Sphere(1)])):
    assert np.isfinite(es.exact_curve(es.Head(grad, grad), law, grad, 3).rms).all()
es.exact_pool_curve(grad, grad, grad, 3)
# and a law that was read so keeps its gradient
law = es.Gaussian(grad)
es.predictions(head, law)
assert law.cov.requires_grad
# squares of large values: the scale of the limit is still right, and an error beyond the range is refused
assert es.exact_pool_curve([[1.0]], [[1.0]], [[1e200]], 3).scale == 1e200
try:
    es.exact_pool_curve([[1.0]], [[1.0], [1.0]], [[1e200], [-1e200]], 3)
except ValueError as refusal:
    assert str(refusal).startswith("v"), refusal
else:
    raise AssertionError("an error whose square is beyond the range")
for name, function in {
    "v": lambda: es.confidence_region([[1.0]], [[1.0], [2.0]], [[1e200], [-1e200]]),
    "k": lambda: es.attend([[1.0]], np.ma.masked_array([[1.0]], [[True]]), [[1.0]]),
    "head.V": lambda: es.delta_covariance(es.Head([[1.0]], [[1e200]]), es.Gaussian([[1.0]]), [[1.0]]),
}.items():
    try:
        function()
    except ValueError as refusal:
        assert str(refusal).startswith(name + ":"), refusal
    else:
        raise AssertionError(name)
# no warning of numpy: a head without values has no error, a bound beyond float64 is infinite
assert es.converge(es.Head([[1.0]], [[0.0]]), es.Rademacher(1), [2], 2, metrics=("mean",))["mean"].accuracy == 0
for size in (1.0, 1e30, 1e60):
    for law in (es.Ball(2, size), es.Cube(2, size), es.Gaussian(size * np.eye(2))):
        for prediction in es.predictions(es.Head(np.eye(2), np.eye(2)), law):
            assert prediction.value is None or not np.isnan(prediction.value([1, 2, 10**6])).any(), prediction.name
            assert not np.isnan(list(prediction.numbers.values())).any(), prediction.name
"""  # noqa: E501


def test_other_things_are_refused_by_name() -> None:
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
