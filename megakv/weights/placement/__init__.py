"""Which part of every weight a tensor-parallel rank keeps."""

from megakv.weights.placement.heads import (
    HeadGroup,
    HeadMap,
    HeadShard,
    contiguous_head_map,
    head_counts,
    tensor_parallel_sizes,
)
from megakv.weights.placement.plan import plan_placement
from megakv.weights.placement.slices import WHOLE, SliceSpec, split_width

__all__ = [
    "WHOLE",
    "HeadGroup",
    "HeadMap",
    "HeadShard",
    "SliceSpec",
    "contiguous_head_map",
    "head_counts",
    "plan_placement",
    "split_width",
    "tensor_parallel_sizes",
]
