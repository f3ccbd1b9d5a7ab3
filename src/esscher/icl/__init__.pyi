from .exact import (
    Risk as Risk,
    bayes_risk as bayes_risk,
    risk as risk,
    risk_gradient as risk_gradient,
)
from .flow import (
    Flow as Flow,
    alpha_limit as alpha_limit,
    final_parameters as final_parameters,
    flow_limit as flow_limit,
    flow_times as flow_times,
    gradient_flow as gradient_flow,
    prompt_length_for as prompt_length_for,
    start_block as start_block,
)
from .layer import (
    OVKQ as OVKQ,
    UV as UV,
    Block as Block,
    Parameters as Parameters,
    default_weights as default_weights,
    predict as predict,
)
from .quadrature import Rule as Rule, product_rule as product_rule
from .tasks import (
    LinearTask as LinearTask,
    Prompts as Prompts,
)
from .training import sampled_risk as sampled_risk
