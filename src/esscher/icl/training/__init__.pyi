from .train import (
    Settings as Settings,
    Training as Training,
    TrainingDiverged as TrainingDiverged,
    train as train,
)
