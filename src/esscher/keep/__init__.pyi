from .chance import (
    AdaptiveRest as AdaptiveRest,
    MagicPIG as MagicPIG,
    Neyman as Neyman,
    Random as Random,
)
from .context import Context as Context
from .named import (
    H2O as H2O,
    TOVA as TOVA,
    BigBird as BigBird,
    Longformer as Longformer,
    LowRank as LowRank,
    RestKV as RestKV,
    SnapKV as SnapKV,
    StreamingLLM as StreamingLLM,
    VAttention as VAttention,
)
from .position import (
    Global as Global,
    Recent as Recent,
    Sinks as Sinks,
    Strided as Strided,
    Window as Window,
)
from .ranked import (
    CriticalKV as CriticalKV,
    ExpectedAttention as ExpectedAttention,
    Fisher as Fisher,
    Heavy as Heavy,
    Impact as Impact,
    KeyNorm as KeyNorm,
    KVgrad as KVgrad,
    KVzip as KVzip,
    KVzipPlus as KVzipPlus,
    Observed as Observed,
    TopK as TopK,
)
from .rule import (
    Chance as Chance,
    Inclusion as Inclusion,
    Ranked as Ranked,
    Rule as Rule,
    Union as Union,
    parse as parse,
    register as register,
    rules as rules,
)
