"""Exact risks of softmax and linear attention at any prompt length, and sampled ones of any task."""

from esscher.icl.risk.bayes import bayes_risk
from esscher.icl.risk.exact import decompose, risk, risk_gradient, risk_tensor
from esscher.icl.risk.sampled import huber, sampled_gradient, sampled_risk
from esscher.icl.risk.softmax_general import Rule, product_rule
from esscher.icl.risk.value import Risk, RiskParts

__all__ = [
    "Risk",
    "RiskParts",
    "Rule",
    "bayes_risk",
    "decompose",
    "huber",
    "product_rule",
    "risk",
    "risk_gradient",
    "risk_tensor",
    "sampled_gradient",
    "sampled_risk",
]
