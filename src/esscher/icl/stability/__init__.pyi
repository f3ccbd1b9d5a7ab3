from .job import pair_flows as pair_flows
