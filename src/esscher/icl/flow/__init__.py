"""Gradient flow at any prompt length, and where it ends."""

from esscher.icl.flow.end import FinalRisks, final_parameters, final_risks, prompt_length_for
from esscher.icl.flow.gronwall import FlowBound, flow_bound
from esscher.icl.flow.limit import alpha_limit, flow_limit, prompt_covariance, start_block
from esscher.icl.flow.trajectory import Flow, Solver, flow_times, gradient_flow

__all__ = [
    "FinalRisks",
    "Flow",
    "FlowBound",
    "Solver",
    "alpha_limit",
    "final_parameters",
    "final_risks",
    "flow_bound",
    "flow_limit",
    "flow_times",
    "gradient_flow",
    "prompt_covariance",
    "prompt_length_for",
    "start_block",
]
