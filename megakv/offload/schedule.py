"""Groups of each batch, where the JSON leaves them to its objective."""

from __future__ import annotations

from contextlib import suppress

from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel

from megakv.costmodel.memory import (
    RESERVE,
    STAGED_LAYERS,
    activation_bytes,
    grouped_tokens,
    grown_bytes,
    waiting_bytes,
)
from megakv.costmodel.shape import ModelShape
from megakv.distributed.agreement import Agreement
from megakv.distributed.sharding import Layout
from megakv.offload.cache import OffloadedCache, is_single
from megakv.offload.config import OffloadConfig
from megakv.offload.times import group_counts

ROWS = "row by row"


def accelerator_room() -> int:
    """Bytes of the accelerator that may still be used."""
    return int(get_accelerator().available_memory() * (1 - RESERVE))


class GroupSchedule:
    """In how many groups the batch under way goes through layers, and `why`.

    Where the JSON leaves that to throughput, rank 0 takes the fewest that have room: before a prompt, and again while
    its answer is generated, ever more seldom.
    """

    def __init__(self, config: OffloadConfig, model: PreTrainedModel, agreement: Agreement):
        self.open, self.count = config.chooses_groups, config.groups
        named = "objective = 'latency'" if config.num_gpu_batches is None else f"num_gpu_batches = {self.count}"
        self.why = f"{_words(self.count)}: megakv.offload.{named}"
        self._agreement, self._steps = agreement, 0
        self._shape: ModelShape | None = None
        if self.open:
            # If the model's config tells its sizes.
            with suppress(ValueError):
                self._shape = ModelShape.from_config(model.config, dtype=model.dtype)

    def new_run(self) -> None:
        """A generation begins."""
        self._steps = 0

    def choose(self, cache: OffloadedCache, layout: Layout, *, buffers: int) -> bool:
        """Before a pass over a cache, on every rank: whether `count` has changed.

        `buffers` are the bytes of those that are there already.
        """
        before, single = self.count, is_single(layout)
        number, self._steps = self._steps, self._steps + single
        # Rows are more with every step: they are counted before the steps 0, 1, 2, 4, 8 and so on. With context
        # parallelism ranks exchange the rows of a prompt's layer whole.
        if not self.open or (number & (number - 1) if single else layout.size > 1):
            return False
        batch, new = layout.tokens[0].batch, len(layout.tokens[cache.rank])
        held = new + sum(cache.tier(0).lengths()) + round(cache.kept(range(cache.table.batch))[0])

        def decide() -> tuple[int, str]:
            count = self._fitting(batch, new, held, single=single, room=accelerator_room() + buffers)
            why = "has room" if self._shape is not None else "the model's config does not tell its sizes"
            return count, f"{_words(count)}: {why}"

        self.count, self.why = self._agreement.decide(decide) if self._agreement.shared else decide()
        return self.count != before

    def _fitting(self, batch: int, new: int, held: int, *, single: bool, room: int) -> int:
        """The fewest groups in which a pass has room; the most there can be where it has none."""
        shape, counts, tp_size = self._shape, group_counts(batch), self._agreement.comm.mesh.tp_size
        if shape is None:
            return counts[0]
        row = shape.attention(tp_size=tp_size).kv_row_bytes

        def nbytes(count: int) -> int:
            # Projections and feed-forward have all sequences of a step of decoding at once.
            computed, waiting = grouped_tokens(new, batch, 1 if single else count)
            working = activation_bytes(shape, computed=computed, held=0, row_bytes=row, tp_size=tp_size)
            return working + waiting_bytes(shape, waiting) + STAGED_LAYERS * grown_bytes(row * -(-held // count))

        return next((count for count in counts if nbytes(count) <= room), counts[-1])


def _words(count: int) -> str:
    return ROWS if count == 1 else f"column by column, {count} groups"
