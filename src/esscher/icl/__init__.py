"""In-context learning by one attention layer: tasks, risks, gradient flow."""

from esscher.icl.attention import KQV, OVKQ, UV, Block, Parameters, default_weights, predict
from esscher.icl.bayes import bayes_risk
from esscher.icl.final import FinalRisks, final_parameters, final_risks, prompt_length_for
from esscher.icl.flow import Flow, flow_times, gradient_flow
from esscher.icl.gronwall import FlowBound, flow_bound
from esscher.icl.limits import alpha_limit, flow_limit, prompt_covariance, start_block
from esscher.icl.risk import Risk, RiskParts, decompose, risk, risk_gradient, risk_tensor, sampled_gradient, sampled_risk
from esscher.icl.softmax_risk import Rule, product_rule
from esscher.icl.tasks import CovariateTask, LinearTask, Prompts, SingleIndexTask, Task

__all__ = [
    "KQV",
    "OVKQ",
    "UV",
    "Block",
    "CovariateTask",
    "FinalRisks",
    "Flow",
    "FlowBound",
    "LinearTask",
    "Parameters",
    "Prompts",
    "Risk",
    "RiskParts",
    "Rule",
    "SingleIndexTask",
    "Task",
    "alpha_limit",
    "bayes_risk",
    "decompose",
    "default_weights",
    "final_parameters",
    "final_risks",
    "flow_bound",
    "flow_limit",
    "flow_times",
    "gradient_flow",
    "predict",
    "product_rule",
    "prompt_covariance",
    "prompt_length_for",
    "risk",
    "risk_gradient",
    "risk_tensor",
    "sampled_gradient",
    "sampled_risk",
    "start_block",
]
