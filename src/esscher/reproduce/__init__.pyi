from .catalogue import all_claims as all_claims, find_claim as find_claim, register as register
from .claim import Claim as Claim, Decision as Decision, Picture as Picture, Series as Series
from .evidence import EvidenceSpec as EvidenceSpec
from .judge import judge as judge
