"""Predicted TTIT over ragged heads: every layer waits for the rank whose heads keep most tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.costmodel.dense import TokenTimes, all_reduce_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.shape import AttentionShape, ModelShape

PAGE_TOKENS = 512
"""Tokens of a call that shows what each of them takes; attention reads them once for all query heads of a KV head."""
LSE_BYTES = 4


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
