"""A pass over one rank's share: do shapes fit, and how much does a cache hold of a token?"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from megakv.attention.partial import Scoring
from megakv.errors import MegaKVError
from megakv.injection.shape_pass import shape_pass
from megakv.weights.placement import HeadMap


class ShapeRuntime:
    """Attention that only compares the heads it is given with the head map, and counts what a cache would hold.

    row_bytes: per layer, bytes of one token's keys and values.
    """

    def __init__(self, head_map: HeadMap, tp_rank: int):
        self._head_map = head_map
        self._tp_rank = tp_rank
        self.row_bytes: dict[int, int] = {}

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """``[1, L, H, Dv]`` without values.

        Raises MegaKVError: if there are other heads than this rank has, or rows do not belong together.
        """
        shard = self._head_map.shard(layer, self._tp_rank)
        heads, kv_heads = len(shard.query_heads), len(shard.kv_heads)
        found = q_BHSD.shape[1], k_BKSD.shape[1], v_BKSD.shape[1]
        # ALiBi lies in an extra column of the keys, one for each query head.
        if found not in ((heads, kv_heads, kv_heads), (heads, heads, heads)):
            raise MegaKVError(
                f"layer {layer}, tensor-parallel rank {self._tp_rank}: attention got (query, key, value) heads "
                f"{found}, the head map has {heads} query heads and {kv_heads} KV heads there"
            )
        rows = {tensor.shape[2] for tensor in (q_BHSD, k_BKSD, v_BKSD)}
        if len(rows) > 1 or q_BHSD.shape[3] != k_BKSD.shape[3]:
            raise MegaKVError(
                f"layer {layer}: shapes of queries {list(q_BHSD.shape)}, keys {list(k_BKSD.shape)} and values "
                f"{list(v_BKSD.shape)} do not fit each other"
            )
        self.row_bytes[layer] = sum(
            tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in (k_BKSD, v_BKSD)
        )
        return q_BHSD.new_empty((1, q_BHSD.shape[2], heads, v_BKSD.shape[3]))


def run_shapes(model: PreTrainedModel, head_map: HeadMap, tp_rank: int, tokens: int) -> dict[int, int]:
    """Run one rank's share over `tokens` of its tokens.

    model: on the meta device, cut for this rank.
    tokens: 1 or more.
    Returns per layer, bytes of one token's keys and values.
    Raises MegaKVError: if shapes do not fit.
    """
    runtime = ShapeRuntime(head_map, tp_rank)
    try:
        layers, logits = shape_pass(model, runtime, tokens)
    except (RuntimeError, IndexError, AssertionError) as error:
        raise MegaKVError(
            f"tensor-parallel rank {tp_rank}: shapes of {type(model).__name__} do not fit: {error}"
        ) from error
    vocab = model.config.get_text_config().vocab_size
    if logits.shape[-1] != vocab or len(runtime.row_bytes) != layers:
        raise MegaKVError(
            f"tensor-parallel rank {tp_rank}: {len(runtime.row_bytes)} of {layers} layers called attention, logits "
            f"have shape {list(logits.shape)} for a vocabulary of {vocab}"
        )
    return runtime.row_bytes
