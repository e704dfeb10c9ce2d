"""Predicted times of what MegaKV is compared with: transformers' own model on one rank, DeepSpeed's tensor parallelism.

They differ from MegaKV in four ways: the last layer computes all tokens, tensor parallelism also cuts the output head,
transformers' growing cache is copied as a whole whenever tokens are added to it, and on a processor single queries go
through PyTorch's kernel.
"""

from __future__ import annotations

from dataclasses import replace

from megakv.base.device import LARGEST_REUSED_BYTES
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes, all_reduce_seconds
from megakv.costmodel.hardware import CallTimes, HardwareProfile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.shape import AttentionShape, ModelShape


class PlainTimes:
    """Predictions for one model: transformers' own, or on `tp_size` ranks of DeepSpeed's tensor parallelism."""

    def __init__(self, profile: HardwareProfile, model: ModelShape, *, tp_size: int = 1, shared_memory: bool = False):
        # Without what MegaKV adds.
        self._profile = profile = profile.model_copy(update={"added": CallTimes()})
        self._model = model
        self._tp_size = tp_size
        self._shared_memory = shared_memory
        self._tokens = TokenTimes(profile, model, tp_size=tp_size, shared_memory=shared_memory, head_ranks=tp_size)

    def prefill(self, new: int, *, masked: bool = False, generating: bool = False) -> float:
        """TTFT of a prompt that `generate` reads, or the model; `masked`: hidden scores are computed, too."""
        seconds = self._end(1) + (self._profile.begin_s if generating else 0.0)
        for index, count in self._model.layer_kinds:
            shape = self._shape(index)
            if masked:
                attention = Kernels(self._profile, shape).block(new, new)
            else:
                attention = LayerTimes(self._profile, shape, Workload((new,), (0,), 1)).predict("single").seconds
            seconds += count * (self._tokens.layer(index, new) + attention)
        return seconds + (self._tokens.late_s(1) if self._tp_size > 1 else 0.0)

    def decode(self, context: int, batch: int = 1, *, copied: bool = False) -> float:
        """TTIT of `generate` behind so many tokens of each sequence; `copied`: the cache grows by being copied."""
        work = Workload((1,) * batch, (context,) * batch, 1)
        late = 1 + self._profile.lag if self._tp_size > 1 else 1.0
        seconds = self._end(batch) + (late - 1) * self._tokens.head(batch) + self._tokens.step_s
        for index, count in self._model.layer_kinds:
            shape = self._shape(index)
            sums = self._tokens.sums(index, batch)
            attention = LayerTimes(self._profile, _decoding(self._profile, shape), work).predict("single").seconds
            layer = late * (self._tokens.layer(index, batch) - sums + attention) + sums
            seconds += count * (layer + (self._copied(shape, batch * (context + 1)) if copied else 0.0))
        return seconds

    def _shape(self, layer: int) -> AttentionShape:
        return self._model.attention(tp_size=self._tp_size, layer=layer)

    def _end(self, sequences: int) -> float:
        nbytes = sequences * self._model.vocab * self._model.element_bytes
        sums = all_reduce_seconds(self._profile, nbytes, self._tp_size, shared_memory=self._shared_memory)
        return self._tokens.end(sequences) + sums

    def _copied(self, shape: AttentionShape, tokens: int) -> float:
        """Keys and values of one layer, each into memory that is a token larger than any that is free."""
        profile, seconds = self._profile, 0.0
        for width in (shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim):
            nbytes = tokens * width * shape.element_bytes
            seconds += profile.copy_bytes.at(nbytes) + profile.page_s * nbytes * (nbytes > LARGEST_REUSED_BYTES)
        return seconds


def _decoding(profile: HardwareProfile, shape: AttentionShape) -> AttentionShape:
    """The same heads, by the kernel that transformers takes for single queries, where it is another than MegaKV's."""
    known = any(table.kernel == "sdpa" for table in profile.attention)
    return replace(shape, kernel="sdpa") if known and shape.kernel == "flash" else shape
