"""How a small error of heads moves the model's last word: pushed forward by Jacobian-vector
products.

Of the continuation of a text, the inputs of all layers being the full model's. Of logits z with
probabilities p, a change dz costs KL = 1/2 Var_p(dz) to second order; gradients of drawn tokens
(models/huggingface/gradients.py) are the other side of the same number.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from esscher.models.downstream.text import Text
from esscher.models.huggingface.capture import AttentionCall

make_dual: Any = forward_ad.make_dual
unpack_dual: Any = forward_ad.unpack_dual

__all__ = ["pushed"]


def pushed(text: Text, errors: Mapping[int, Tensor]) -> Tensor:
    """J e, (D, words): the change of the logits, to first order, when heads' outputs move by errors
    (heads, D, width).
    """

    def move(captured: AttentionCall, out: Tensor) -> Tensor:
        error = errors.get(captured.layer)
        if error is None:
            return out
        tangent = error[None].to(out.dtype)
        primal, before = unpack_dual(out)
        moved: Tensor = make_dual(primal, tangent if before is None else tangent + before)
        return moved

    # fused kernels have no derivatives
    with warnings.catch_warnings(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings(
            "ignore", category=DeprecationWarning, module=r"torch\."
        )  # of its own, when it first needs them
        result, _ = text.decode(lambda captured: None, after=move)
        change: Tensor = unpack_dual(result.logits).tangent
        return change[0].clone()
