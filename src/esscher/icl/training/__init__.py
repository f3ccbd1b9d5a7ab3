"""Paired training by SGD."""

from esscher.icl.training.train import Settings, Training, TrainingDiverged, train

__all__ = ["Settings", "Training", "TrainingDiverged", "train"]
