"""Methods of your own: one of each kind, registered when the module is imported.

A JSON with ``"plugins": ["my_methods"]`` in its ``megakv`` section may ask for them by name; start the ranks in this
folder.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

import megakv
from megakv.attention.method import AttentionCall
from megakv.attention.partial import PackedAttention
from megakv.attention.ring import KVFormat, Scratch, pass_around
from megakv.fairkv.method import CompressionMethod, Segment
from megakv.injection.policy import Policy
from megakv.offload.method import Split
from megakv.offload.prices import GroupPrices
from megakv.weights.formats.blocks_at_load import BlocksAtLoad


class OwnLast:
    """Ring attention that attends to what comes from other ranks first, and to its own keys and values last."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Outputs ``[H, L, Dv]`` and log-sum-exps ``[H, L]`` of this rank's queries."""
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim)
        messages, parts = KVFormat(call, call.held), call.dense_parts()
        for source, message in pass_around(call, messages, parts, self._scratch, operation="own_last"):
            for part in messages.unpack(source, message) if source != call.rank else []:
                attention.add(part)
        for part in parts:
            attention.add(part)
        return attention.result()


class Half:
    """Half of the tokens are recomputed, whatever that costs."""

    recomputes, attends_on_host = True, False

    def split(self, prices: GroupPrices) -> Split | None:
        """A group's tokens, divided."""
        if not prices.inputs:
            return None
        return Split(prices.tokens, prices.inputs // 2, resident=prices.resident, chunk=prices.chunk)


class EveryNth(CompressionMethod):
    """Tokens at multiples of a stride first, then the others, earlier ones first."""

    name: ClassVar[str] = "every_nth"
    stride: int = Field(3, ge=1)

    @property
    def least(self) -> int:
        """The smallest budget."""
        return 1

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        """Scores ``[K, S]``: higher ones are kept."""
        score = (segment.order % self.stride == 0).float() * segment.length + segment.length - segment.order
        return score.expand(segment.k_KSD.shape[0], -1)


class AllInFourBits(BlocksAtLoad):
    """Blocks of 4 bits for embeddings and the output head, too."""

    name, kind, outside = "all_q4_1", "Q4_1", "Q4_1"
    loses = "all weights of linears and embeddings are rounded to 4 bits in blocks of 32"


megakv.register_prefill_method("own_last", OwnLast, decode=True)
megakv.register_offload_method("half", Half())
megakv.register_compression_method(EveryNth)
megakv.register_weight_format(AllInFourBits)
megakv.register_policy("my_model", Policy(learned_positions=True))
