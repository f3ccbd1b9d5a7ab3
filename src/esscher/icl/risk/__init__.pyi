from .bayes import bayes_risk as bayes_risk
from .exact import (
    decompose as decompose,
    risk as risk,
    risk_gradient as risk_gradient,
    risk_tensor as risk_tensor,
)
from .sampled import (
    huber as huber,
    sampled_gradient as sampled_gradient,
    sampled_risk as sampled_risk,
)
from .softmax_general import Rule as Rule, product_rule as product_rule
from .value import Risk as Risk, RiskParts as RiskParts
