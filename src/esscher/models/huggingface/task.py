"""What a model says in the end: the next token, a label, or hidden states alone."""

from __future__ import annotations

import importlib
from typing import Any, Literal

__all__ = ["Task", "auto_class", "task_of"]

Task = Literal["language", "classifier", "encoder"]


def auto_class(config: Any) -> str:
    """The class of transformers that reads a checkpoint with the head it was made with."""
    return _reader(next(iter(getattr(config, "architectures", None) or ()), ""))


def task_of(model: Any) -> Task:
    """What this model is for, by its class."""
    return TASKS.get(_reader(type(model).__name__), "encoder")


TASKS: dict[str, Task] = {
    "AutoModelForCausalLM": "language",
    "AutoModelForSequenceClassification": "classifier",
}


def _reader(made: str) -> str:
    """What reads a class of models; of a class without a head the plain reader."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    if made in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "AutoModelForCausalLM"
    labels = made in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    return "AutoModelForSequenceClassification" if labels else "AutoModel"
