from .distance import Apart as Apart, apart as apart
from .job import pair_flows as pair_flows
from .traps import Trap as Trap, traps as traps
from .verdict import verdict as verdict
