"""Bytes that a rank sends in a pass of a whole model: context-parallel methods, and sums over tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megakv.costmodel.context_parallel import Workload, balanced_tokens, sent_bytes
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.tensor_parallel import SUMS, all_reduce_bytes
from megakv.distributed.sharding import chunk_bounds
from megakv.runahead.partition import Partition


def pass_bytes(
    model: ModelShape,
    workload: Workload,
    method: str,
    *,
    tp_size: int = 1,
    partitions: Sequence[Partition] | None = None,
) -> dict[str, int]:
    """Bytes by operation of the rank that sends most, all layers together.

    workload: cached tokens are spread evenly; so are new ones unless `partitions` says otherwise. With fewer than 2N of
        each sequence it is a step of decoding.
    method: as `megakv.costmodel.context_parallel.sent_bytes`.
    partitions: for ``runahead``, the tokens of every rank, per sequence.
    """
    size, sequences = workload.size, len(workload.new)
    held = _sums([balanced_tokens(count, size) for count in workload.cached])
    stored = _new_tokens(workload, partitions)
    new = [workload.total_new] * size if method == "replicated" else stored
    kept = [fresh + old for fresh, old in zip(stored, held, strict=True)]
    # A prompt's last layer is asked for one token of each sequence: in a ring rank 0 has the last chunk.
    prompt = max(workload.new) >= 2 * size
    asking = max(rank for rank, count in enumerate(new) if count) if method == "runahead" else 0
    asked = [sequences * (rank == asking) for rank in range(size)]
    last = model.layers[-1]

    def sent(rank: int) -> Counter[str]:
        total: Counter[str] = Counter()
        for index, count in model.layer_kinds:
            shape, ends = model.attention(tp_size=tp_size, layer=index), prompt and model.layers[index] == last
            for times, wanted in ((count - ends, None), (int(ends), asked)):
                each = sent_bytes(method, shape, new=new, kept=kept, rank=rank, cached=held, wanted=wanted)
                rows = sequences if wanted is asked else max(1, new[rank])
                each["all_reduce"] = SUMS * all_reduce_bytes(rows * model.hidden * model.element_bytes, tp_size)
                total.update({name: times * nbytes for name, nbytes in each.items()})
        return total

    # Rings load their ranks alike but for a token; of a chain the link before the last carries most.
    most = max((sent(rank) for rank in sorted({0, max(0, size - 2), size - 1})), key=Counter.total)
    return {name: nbytes for name, nbytes in most.items() if nbytes}


def _new_tokens(workload: Workload, partitions: Sequence[Partition] | None) -> list[int]:
    """New tokens that every rank computes, and keeps."""
    size = workload.size
    if partitions is not None:
        return _sums(partitions)
    if max(workload.new) < 2 * size:
        counts: list[int] = np.diff(chunk_bounds(workload.total_new, size)).tolist()
        return counts
    return _sums([balanced_tokens(count, size) for count in workload.new])


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip(*counts, strict=True)]
