"""The columns of every table that the runs of the lab store."""

from __future__ import annotations

from esscher.errors.curve import STDERR
from esscher.icl.layer import KINDS
from esscher.runs.columns import Column


def _log(key: str, label: str, text: str) -> Column:
    return Column(key, "float", label, text, "log")


COVARIANCE = Column(
    "covariance",
    "word",
    "covariance",
    "Covariance of the covariates: isotropic, kms:RHO or diag:A,B,...",
)
LENGTH = Column("length", "int", "prompt length", "Labelled tokens in a prompt.", "log")
SEED = Column("seed", "int", "seed", "Number of the first weights.")
MODEL = Column(
    "model",
    "word",
    "model",
    "softmax or linear attention; bayes is the best predictor on as many tokens.",
    "words",
)
MSE = _log(
    "mse",
    "mean squared error",
    "Mean squared error of the query's noisy label; the risk is half of it.",
)
STATUS = Column("status", "word", "status", "ok, or what went wrong.", "words")
START = (COVARIANCE, LENGTH, SEED)

STEP = Column(
    "step",
    "int",
    "step",
    "Steps of training so far; of a model that diverged, the step at which it did.",
    "log",
)
LOSS = _log(
    "loss",
    "loss",
    "Mean loss of the batches since the last record; at the end, that of the last batch.",
)
ADVICE = "What happened to a model that diverged, and what helps."
PATH = "U without its last column and the last row of OV, row by row, head by head."
APART = "Squared distance between the parameters of the two models."
TRAIN = {
    "curve": (STEP, MODEL, LOSS, MSE, STDERR, *START),
    "distance": (STEP, _log("distance2", "squared distance", APART), *START),
    "path": (STEP, MODEL, Column("values", "list", "parameters", PATH), *START),
    "final": (
        *(MODEL, MSE, STDERR, STATUS, STEP, LOSS),
        Column("advice", "word", "advice", ADVICE),
        Column("O", "list", "O", "Output map, flattened, head by head."),
        Column("V", "list", "V", "Value map, flattened, head by head."),
        Column("K", "list", "K", "Key map, flattened, head by head."),
        Column("Q", "list", "Q", "Query map, flattened, head by head."),
        *START,
    ),
}

FLOW = {"final": (COVARIANCE, LENGTH, MODEL, MSE, STDERR)}
TIME = _log("time", "time", "Time of the gradient flow.")
TRAJECTORY = {
    "trajectory": (
        *(COVARIANCE, LENGTH, MODEL, TIME, MSE),
        _log(
            "gradient",
            "norm of the gradient",
            "Euclidean norm of the gradient of the risk in U11 and v.",
        ),
        Column("v", "float", "v", "Value of the block form.", "linear"),
        Column("U11", "list", "U11", "Score matrix of the block form, row by row."),
    ),
    "apart": (
        *(COVARIANCE, LENGTH, TIME),
        _log(
            "distance",
            "softmax to linear",
            "Distance between the parameters of softmax and linear attention.",
        ),
        _log(
            "softmax_limit",
            "softmax to the limit",
            "Distance of softmax attention to the flow without end.",
        ),
        _log(
            "linear_limit",
            "linear to the limit",
            "Distance of linear attention to the flow without end.",
        ),
        _log(
            "bound",
            "Lemma E.1",
            "Bound of Lemma E.1 on the distance: g2 t exp(beta t) of both, added.",
        ),
        _log(
            "sharper", "sharper bound", "The same with the most negative curvature instead of beta."
        ),
    ),
}

TIME_OF_SGD = _log("time", "time", "Time of the flow: twice the rate of SGD times its steps.")
LEAD = "At the start: alignment of the block form with the task, less its mirror image's."
BALANCE = "|K|^2 + |Q|^2 - |o|^2 - |V|^2; the flow of linear attention keeps it."


def _shares(kind: str) -> tuple[Column, ...]:
    """The columns of the starts of one model."""
    low, high = f"{kind}_low", f"{kind}_high"
    stuck = "Share of starts that are stuck after training."
    never = "Share of starts that have not arrived when the flow is stopped."
    lead = "Chance that a stuck start has a smaller lead than another."
    return (
        Column(kind, "float", f"{kind} stuck", stuck, ends=(low, high)),
        Column(low, "float", f"{kind}, low", "End of its 95 % interval."),
        Column(high, "float", f"{kind}, high", "End of its 95 % interval."),
        Column(f"{kind}_never", "float", f"{kind}, never", never),
        Column(f"{kind}_lead", "float", f"{kind}, lead", lead),
    )


STABILITY = {
    "flows": (
        *(*START, MODEL, STATUS, MSE),
        Column(
            "error",
            "float",
            "error",
            "Standard error of the cubature behind the mean squared error.",
        ),
        _log(
            "end",
            "end of the block form",
            "Mean squared error where the flow of the block form ends.",
        ),
        _log(
            "last",
            "last error",
            "Mean squared error where the flow was stopped, long after training.",
        ),
        _log(
            "arrival",
            "arrival",
            "Time from which on the error is within 5 % of the end; none if never.",
        ),
        _log("stay", "stay", "Time of training before arrival with a gradient of norm below 0.01."),
        _log("plateau", "plateau", "Mean squared error where the gradient was smallest then."),
        _log("slowest", "slowest", "Norm of the gradient there."),
        Column("values", "list", "weights", "o, V, K, Q after training, row by row."),
        Column("lead", "float", "lead", LEAD),
    ),
    "curve": (
        *(*START, MODEL, TIME_OF_SGD, MSE),
        _log("slope", "gradient", "Norm of the gradient of the risk in (o, V, K, Q)."),
        Column("balance", "float", "balance", BALANCE),
    ),
    "distance": (
        *(*START, TIME_OF_SGD),
        _log(
            "weights2",
            "distance of the weights",
            "Squared distance between the weights (o, V, K, Q).",
        ),
        _log(
            "modulo2",
            "distance modulo scale",
            "The same, least over the scale linear attention ignores.",
        ),
        _log(
            "product2",
            "distance of the products",
            "Squared distance between value times score maps.",
        ),
    ),
    "verdict": (
        *(COVARIANCE, LENGTH),
        Column("starts", "int", "starts", "First weights, the same for both models."),
        *(column for kind in KINDS for column in _shares(kind)),
        *(
            Column(
                f"only_{kind}",
                "int",
                f"{kind} alone",
                f"Starts that are stuck more often for {kind} attention.",
            )
            for kind in KINDS
        ),
        _log("p", "p", "Exact two-sided sign test; of single settings corrected by Holm's method."),
    ),
}

N = Column("n", "int", "prompt length", LENGTH.help, "log")
AGAINST = Column(
    "against",
    "word",
    "against",
    "linear attention on the same prompt, or the limit of both.",
    "words",
)
METRIC = Column(
    "metric",
    "word",
    "difference of",
    "The output, its gradients, the gradient of the loss, or that of the risk.",
    "words",
)
RMS = _log(
    "rms",
    "rms difference",
    "Root mean square over prompts of the difference; of a bound, its height.",
)
EXPONENT = Column(
    "exponent",
    "float",
    "exponent",
    "The difference, or the bound, falls as n to minus this.",
    ends=("low", "high"),
)
CONCENTRATION = {
    "errors": (
        *(COVARIANCE, N, AGAINST, METRIC),
        Column("repeat", "int", "repeat", "Number of the group of prompts."),
        _log(
            "squared",
            "squared difference",
            "Mean over a group of prompts of the squared difference.",
        ),
    ),
    "exact": (
        *(COVARIANCE, N, AGAINST),
        _log(
            "error",
            "difference",
            "Norm of the difference of the exact gradients of the mean squared error.",
        ),
    ),
    "curves": (N, RMS, STDERR, COVARIANCE, AGAINST, METRIC),
    "rates": (
        *(COVARIANCE, AGAINST, METRIC, EXPONENT),
        Column("low", "float", "exponent, low", "Lower end of the exponent's interval."),
        Column("high", "float", "exponent, high", "Upper end of the exponent's interval."),
        _log("constant", "constant", "The difference is about this times n to minus the exponent."),
        STATUS,
        Column("reason", "word", "reason", "What the status of the fit means."),
    ),
    "risks": (
        *(COVARIANCE, N),
        Column(
            "quantity",
            "word",
            "quantity",
            "The risk, Lemma E.2, or its gradient in (U, V), Lemma E.4.",
            "words",
        ),
        _log(
            "measured",
            "measured",
            "Exact difference between prompts of n tokens and infinitely many.",
        ),
        _log(
            "printed", "as printed", "The lemma as printed, with the norms measured on the prompts."
        ),
        _log("mended", "mended", "The lemma mended, with the norms measured on the prompts."),
    ),
    "bounds": (
        *(METRIC, Column("name", "word", "bound", "Name of the bound.")),
        *(N, RMS, EXPONENT, COVARIANCE),
    ),
}
