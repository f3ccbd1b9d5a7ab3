from .call import AttentionCall as AttentionCall
from .capture import (
    StopForward as StopForward,
    capture as capture,
    forward as forward,
    parity as parity,
)
from .interventions import (
    Kept as Kept,
    intervene as intervene,
    prefill as prefill,
    rule_for_every_query as rule_for_every_query,
)
from .loading import (
    Loaded as Loaded,
    load_model as load_model,
    wrap_model as wrap_model,
)
from .maps import (
    LinearMaps as LinearMaps,
    head_projections as head_projections,
    linear_maps as linear_maps,
)
