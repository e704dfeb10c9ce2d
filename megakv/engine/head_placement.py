"""What an engine needs of a mapping of KV heads to ranks."""

from megakv.fairkv.placement import SETTING, check_weights, place_heads, read_mapping
from megakv.fairkv.replicas import HeadReplicas

__all__ = ["SETTING", "HeadReplicas", "check_weights", "place_heads", "read_mapping"]
