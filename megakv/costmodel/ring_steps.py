"""One attention layer of the ring methods step by step, as each rank of a balanced layout goes through it."""

from __future__ import annotations

from dataclasses import dataclass

from megakv.costmodel.attention_time import LayerTimes, Prediction, _Step


@dataclass(frozen=True)
class RingSteps:
    """What one rank does in one layer."""

    pack_s: float  # Before the first step: packing what is sent.
    overhead_s: float  # At the start of every step.
    busy_s: tuple[float, ...]  # Attention and merging, per step; its own shard comes first.
    transfer_s: float = 0.0  # Exchange of the shards of one step, where they travel one by one.
    gather_s: float = 0.0  # All-gather before the first step, where they travel together.
    unpack_s: float = 0.0  # After the last step: packing what returns, its All2All, and merging.
    return_s: float = 0.0
    combine_s: float = 0.0


class LayerSteps(LayerTimes):
    """The terms of `LayerTimes` with the rank and the step that they belong to."""

    def steps(self, method: str, rank: int) -> RingSteps:
        """A rank's way through one layer.

        method: ``pass_kv``, ``pass_q``, ``all_gather``, ``tsp`` or ``tsp_causal``.
        rank: context-parallel rank.
        Raises ValueError: for a prompt of fewer than 2N tokens, which is served like decoding.
        """
        if self.size > 1 and max(self.workload.new) < 2 * self.size:
            raise ValueError(
                f"a prompt of {max(self.workload.new)} tokens on {self.size} context-parallel ranks is served like "
                f"decoding: allowed here: {2 * self.size} tokens or more"
            )
        if self.size == 1:
            return RingSteps(0.0, 0.0, (self.predict(method).seconds,))
        overhead = self.profile.step_overhead_s.get(method, 0.0)
        sent, row = self._kept, self.shape.kv_row_bytes
        if method == "pass_q":
            sent, row = self._computed, self.shape.query_row_bytes
        message = row * sent
        pack = self.profile.copy_bytes.at(message)
        busy = tuple(self._busy(method, rank, step) for step in range(self.size))
        if method == "pass_kv":
            return RingSteps(pack, overhead, busy, transfer_s=self.profile.exchange.at(message))
        if method != "pass_q":
            return RingSteps(pack, overhead, busy, gather_s=self.profile.all_gather.at(message * (self.size - 1)))
        back = Prediction(method)
        self._return(back, self._computed, self.workload.total_new - self._computed)
        late = self.profile.straggle * sum(self._step_at(method, rank, step).attention_s for step in range(self.size))
        return RingSteps(
            pack,
            overhead,
            busy,
            transfer_s=self.profile.exchange.at(message),
            unpack_s=back.terms["copy"],
            return_s=back.terms["collective"] + late,
            combine_s=back.terms["merge"],
        )

    def wanted(self, method: str) -> tuple[float, float, float]:
        """Seconds of a last layer that one token of each sequence is asked of.

        Returns attention, all else, and what of that is a collective.
        """
        terms = self.predict_last(method).terms
        attention = terms.pop("attention", 0.0)
        return attention, sum(terms.values()), terms.get("collective", 0.0)

    def _step_at(self, method: str, rank: int, step: int) -> _Step:
        if method in ("tsp", "tsp_causal"):
            return self._shares(method == "tsp") if step == 0 else self._shares(False, foreign=True)
        merging = method != "pass_q"
        if step == 0:
            return self._step("own")
        return self._step("earlier" if rank >= step else "later", merging=merging)

    def _busy(self, method: str, rank: int, step: int) -> float:
        """Seconds of attention and merging in one step."""
        if method == "tsp_causal" and step > rank:
            return 0.0  # Later shards are hidden from every row.
        alone = Prediction(method)
        self._ring(alone, [self._step_at(method, rank, step)], 0.0)
        return alone.seconds - alone.terms["overhead"]
