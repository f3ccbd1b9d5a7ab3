"""In-context learning by one attention layer: tasks, risks, gradient flow."""

from esscher.icl.flow.end import FinalRisks, final_parameters, final_risks, prompt_length_for
from esscher.icl.flow.flow import Flow, flow_times, gradient_flow
from esscher.icl.flow.gronwall import FlowBound, flow_bound
from esscher.icl.flow.limit import alpha_limit, flow_limit, prompt_covariance, start_block
from esscher.icl.layer import KQV, OVKQ, UV, Block, Parameters, default_weights, predict
from esscher.icl.risk.bayes import bayes_risk
from esscher.icl.risk.risk import Risk, RiskParts, decompose, risk, risk_gradient, risk_tensor, sampled_gradient, sampled_risk
from esscher.icl.risk.softmax import Rule, product_rule
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
