"""The works behind the predictions, as BibTeX, by the keys used in ``Prediction.source``."""

from __future__ import annotations

__all__ = ["REFERENCES"]

REFERENCES: dict[str, str] = {
    "[B]": (
        r"""@misc{bohbot2025token,
  author        = {Bohbot, L{\'e}a and Letrouit, Cyril and Peyr{\'e}, Gabriel and Vialard,
  Fran{\c{c}}ois-Xavier}, title         = {Token Sample Complexity of Attention}, year          =
  {2025}, eprint        = {2512.10656}, archivePrefix = {arXiv},
}"""
    ),
    "[S]": (
        r"""@misc{boursier2025softmax,
  author        = {Boursier, Etienne and Boyer, Claire}, title         = {Softmax as Linear
  Attention in the Large-Prompt Regime: a Measure-based Perspective}, year          = {2025}, eprint
  = {2512.11784}, archivePrefix = {arXiv},
}"""
    ),
}
