"""The works behind the predictions, as BibTeX, by the keys used in ``Prediction.source``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that citing needs no torch
    from esscher.theory.prediction import Prediction

__all__ = ["REFERENCES", "cited"]

REFERENCES: dict[str, str] = {
    "[B]": r"""@misc{bohbot2025token,
  author        = {Bohbot, L{\'e}a and Letrouit, Cyril and Peyr{\'e}, Gabriel and Vialard, Fran{\c{c}}ois-Xavier},
  title         = {Token Sample Complexity of Attention},
  year          = {2025},
  eprint        = {2512.10656},
  archivePrefix = {arXiv},
}""",
    "[S]": r"""@misc{boursier2025softmax,
  author        = {Boursier, Etienne and Boyer, Claire},
  title         = {Softmax as Linear Attention in the Large-Prompt Regime: a Measure-based Perspective},
  year          = {2025},
  eprint        = {2512.11784},
  archivePrefix = {arXiv},
}""",
}


def cited(predictions: Iterable[Prediction]) -> list[str]:
    """BibTeX entries of the works that the given predictions come from, each once, in the order of first use."""
    keys = [key for prediction in predictions for key in REFERENCES if key in prediction.source]
    return [REFERENCES[key] for key in dict.fromkeys(keys)]
