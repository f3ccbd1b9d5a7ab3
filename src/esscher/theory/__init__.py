"""What is known about the error in closed form: proved bounds, rates, heuristics."""

import lazy_loader

# BibTeX of the works behind the predictions, by the keys used in ``Prediction.source``
REFERENCES: dict[str, str] = {
    "[B]": r"""@misc{bohbot2025token,
  author        = {Bohbot, L{\'e}a and Letrouit, Cyril and Peyr{\'e}, Gabriel and Vialard, Fran{\c{c}}ois-Xavier},
  title         = {Token Sample Complexity of Attention},
  year          = {2025},
  eprint        = {2512.10656},
  archivePrefix = {arXiv},
}""",  # noqa: E501
    "[S]": r"""@misc{boursier2025softmax,
  author        = {Boursier, Etienne and Boyer, Claire},
  title         = {Softmax as Linear Attention in the Large-Prompt Regime: a Measure-based Perspective},
  year          = {2025},
  eprint        = {2512.11784},
  archivePrefix = {arXiv},
}""",  # noqa: E501
}

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
