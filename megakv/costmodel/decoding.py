"""Predicted TTIT of a whole model: a decoding step through all layers, and its logits; also over ragged heads."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes, all_reduce_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.shape import AttentionShape, ModelShape

PAGE_TOKENS = 512
"""Tokens of a call that shows what each of them takes; attention reads them once for all query heads of a KV head."""
LSE_BYTES = 4


def ttit_seconds(
    profile: HardwareProfile, model: ModelShape, workload: Workload, method: str, *, tp_size: int = 1
) -> float:
    """Seconds of one decoding step of `generate`; sums over tensor-parallel ranks as far as the profile knows them.

    All ranks meet in every layer and at the end, where they are told the results and rank 0's word on going on. The
    last of them is late by a part of what all compute between two meetings, which a ring hides where every rank has
    queries of its own to attend with.

    method: ``pass_q``, where the sequences' tokens are spread over the ring, or ``replicated``: all ranks compute all.
    """
    replicated, sequences = method == "replicated", len(workload.new)
    tokens = workload.total_new if replicated else -(-workload.total_new // workload.size)
    dense = TokenTimes(profile, model, tp_size=tp_size)
    lag = profile.lag if workload.size * tp_size > 1 else 0.0
    hiding = not replicated and 1 < workload.size <= sequences
    seconds = 0.0
    for index, count in model.layer_kinds:
        times = LayerTimes(profile, model.attention(tp_size=tp_size, layer=index), workload)
        prediction = times.predict(method)
        attention = prediction.terms["attention"]
        sums = dense.sums(index, tokens)
        own = dense.layer(index, tokens) - sums
        late = max(0.0, lag * own - (attention / workload.size if hiding else 0.0)) + lag * attention
        seconds += count * max(prediction.seconds + own + late + sums, profile.launch_s)
    owners = 1 if replicated else min(workload.size, sequences)
    shared = 1 + owners if workload.size > 1 else 0
    heads = sequences if replicated else tokens
    return seconds + lag * dense.head(heads) + dense.end(heads, shared=shared) + dense.step_s


class RaggedTimes:
    """Predictions for tensor-parallel ranks that hold whole KV heads, or parts of their tokens."""

    def __init__(
        self, profile: HardwareProfile, shape: AttentionShape, *, batch: int, ranks: int, shared_memory: bool = False
    ):
        self._profile = profile
        self._shape = shape
        self._batch = batch
        self._ranks = ranks
        self._shared_memory = shared_memory
        head = AttentionShape(
            shape.heads // shape.kv_heads, 1, shape.key_dim, shape.value_dim, shape.element_bytes, kernel=shape.kernel
        )
        kernels = Kernels(profile, head)
        # What a call costs by itself is paid once for all pages.
        self._call_s = kernels.block(1, 1)
        self._token_s = (kernels.block(1, PAGE_TOKENS) - self._call_s) / (PAGE_TOKENS - 1)

    def attention(self, loads: Sequence[Sequence[int]], divided: Sequence[bool]) -> float:
        """Seconds of one step's attention, each layer ending in a sum of its outputs.

        loads: ``[layer][rank]`` kept tokens of all heads and sequences.
        divided: ``[layer]`` whether ranks share a head's tokens: then they also learn each other's log-sum-exps.
        """
        shape = self._shape
        outputs = self._batch * shape.heads * shape.value_dim * shape.element_bytes
        return sum(
            self._layer(layer) + self._sum(outputs) + shared * self._sum(self._lse_bytes)
            for layer, shared in zip(loads, divided, strict=True)
        )

    def step(self, model: ModelShape, loads: Sequence[Sequence[int]], divided: Sequence[bool]) -> float:
        """TTIT of a whole model, whose output head every rank computes."""
        tokens = TokenTimes(self._profile, model, tp_size=self._ranks, shared_memory=self._shared_memory)
        whole = TokenTimes(self._profile, model)
        late = self._profile.lag
        seconds = late * whole.head(self._batch) + whole.end(self._batch, shared=1) + whole.step_s
        for index, (layer, shared) in enumerate(zip(loads, divided, strict=True)):
            sums = tokens.sums(index, self._batch)
            seconds += (1 + late) * (tokens.layer(index, self._batch) - sums) + sums
            seconds += self._layer(layer) + shared * self._sum(self._lse_bytes)
        return seconds

    def _layer(self, loads: Sequence[int]) -> float:
        # No lag: it is that of products which wait for memory, and here each key that is read meets a group of queries.
        return self._call_s + max(loads) * self._token_s

    def _sum(self, nbytes: float) -> float:
        return all_reduce_seconds(self._profile, nbytes, self._ranks, shared_memory=self._shared_memory)

    @property
    def _lse_bytes(self) -> int:
        return self._ranks * self._batch * self._shape.heads * LSE_BYTES
