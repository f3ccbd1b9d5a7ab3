"""Hugging Face models as a source of tokens: load, capture q, k, v, prove parity, read off linear maps, describe."""

from esscher.models.huggingface.capture import Captured, CaptureReport, StopForward, capture, forward
from esscher.models.huggingface.loading import Loaded, load_model, wrap_model
from esscher.models.huggingface.maps import LinearMaps, linear_maps
from esscher.models.huggingface.parity import Parity, parity

__all__ = [
    "CaptureReport",
    "Captured",
    "LinearMaps",
    "Loaded",
    "Parity",
    "StopForward",
    "capture",
    "forward",
    "linear_maps",
    "load_model",
    "parity",
    "wrap_model",
]
