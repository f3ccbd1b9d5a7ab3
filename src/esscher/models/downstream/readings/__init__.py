"""What is read off a model's last word, one file each; a reading compares the full model with one
that keeps a few keys.
"""

from __future__ import annotations

from esscher.models.downstream.readings.agreement import Agreement
from esscher.models.downstream.readings.cosine import Cosine
from esscher.models.downstream.readings.divergence import Divergence
from esscher.models.downstream.readings.error import Error
from esscher.models.downstream.readings.loss import Loss
from esscher.models.downstream.readings.needle import Found
from esscher.models.downstream.readings.neighbour import Neighbour
from esscher.models.downstream.readings.reading import Outcome, Reading
from esscher.models.downstream.readings.worst import WorstQuery

__all__ = ["READINGS", "Outcome", "Reading"]

READINGS: tuple[Reading, ...] = (
    Divergence(),
    Agreement(),
    Loss(),
    Cosine(),
    Neighbour(),
    Found(),
    WorstQuery(),
    Error(),
)
