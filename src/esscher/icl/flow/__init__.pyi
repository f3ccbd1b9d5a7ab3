from .end import (
    FinalRisks as FinalRisks,
    final_parameters as final_parameters,
    final_risks as final_risks,
    prompt_length_for as prompt_length_for,
)
from .gronwall import FlowBound as FlowBound, flow_bound as flow_bound
from .limit import (
    alpha_limit as alpha_limit,
    flow_limit as flow_limit,
    prompt_covariance as prompt_covariance,
    start_block as start_block,
)
from .trajectory import (
    Flow as Flow,
    Solver as Solver,
    flow_times as flow_times,
    gradient_flow as gradient_flow,
)
