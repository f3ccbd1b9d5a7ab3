from .prediction import Prediction as Prediction, predictions as predictions

REFERENCES: dict[str, str]
