"""In-context learning by one attention layer: tasks, risks, gradient flow."""

from esscher.icl.attention import KQV, OVKQ, UV, Block, default_weights, predict
from esscher.icl.tasks import CovariateTask, LinearTask, Prompts, SingleIndexTask, Task

__all__ = [
    "KQV",
    "OVKQ",
    "UV",
    "Block",
    "CovariateTask",
    "LinearTask",
    "Prompts",
    "SingleIndexTask",
    "Task",
    "default_weights",
    "predict",
]
