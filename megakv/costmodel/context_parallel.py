"""Closed forms of context parallelism: bytes, operations, and the inequalities of its Sections 3.2 to 3.4, Appendix C.

T new tokens attend to P cached ones and to themselves, on N ranks. C is the operations per second of one rank, BW the
bytes per second of the ring's exchange. Where the paper writes D it means all query heads together, N_H x D_H.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megakv.base.partition import Partition
from megakv.costmodel.dense import SUMS, all_reduce_bytes
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.distributed.layouts import balanced_tokens
from megakv.distributed.sharding import chunk_bounds


@dataclass(frozen=True)
class Workload:
    """The tokens of one pass over all ranks. Raises ValueError for lengths and degrees that no pass has."""

    new: tuple[int, ...]  # T and P of every sequence of the batch.
    cached: tuple[int, ...]
    size: int  # Context-parallel degree N.

    def __post_init__(self) -> None:
        if len(self.new) != len(self.cached):
            raise ValueError(f"{len(self.new)} lengths of new tokens with {len(self.cached)} of cached ones")
        if min(self.new, default=0) < 0 or min(self.cached, default=0) < 0 or sum(self.new) == 0:
            raise ValueError(f"new = {self.new} and cached = {self.cached} must be 0 or more, and some token new")
        if self.size < 1:
            raise ValueError(f"size = {self.size}: allowed: 1 or more ranks")

    @property
    def total_new(self) -> int:
        return sum(self.new)

    @property
    def total(self) -> int:
        """T + P, summed over the batch."""
        return self.total_new + sum(self.cached)

    @property
    def miss_rate(self) -> float:
        return self.total_new / self.total


def rank_totals(counts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each rank, over sequences."""
    return [sum(each) for each in zip(*counts, strict=True)]


# Table 3


def flops_per_pair(shape: AttentionShape) -> int:
    """Operations of one query token against one key token: 4 D."""
    return 2 * shape.heads * (shape.key_dim + shape.value_dim)


def attention_flops(shape: AttentionShape, new: int, cached: int, *, causal: bool = False) -> float:
    """``4 T D (T + P)``; with `causal` only what the mask leaves, half of it in a full prefill."""
    pairs = new * cached + new * new / 2 if causal else new * (new + cached)
    return flops_per_pair(shape) * pairs


# Table 2


def tp_bytes_per_block(shape: ModelShape, tokens: int) -> int:
    """Tensor parallelism: two all-reduces of ``T x N_H x D_H`` elements."""
    return 2 * tokens * shape.heads * shape.key_dim * shape.element_bytes


def cp_bytes_per_block(shape: ModelShape, tokens: int) -> int:
    """Context parallelism: one ring of ``2 x T x N_KV x D_H`` elements, all ranks' shards together."""
    return tokens * shape.attention().kv_row_bytes


# Equations 1, 2, 3, 5


def miss_rate_of_equal_bytes(shape: AttentionShape) -> float:
    """Equation 1: at or below the miss rate ``2 N_KV / N_H`` queries are no larger than keys and values."""
    return shape.kv_row_bytes / shape.query_row_bytes


def miss_rate_of_equal_traffic(shape: AttentionShape) -> float:
    """Equation 1 with the All2All counted: below it, queries and returning partial results are the fewer bytes."""
    return shape.kv_row_bytes / (shape.query_row_bytes + shape.partial_row_bytes)


def new_tokens_hiding_kv(shape: AttentionShape, *, size: int, flops: float, bandwidth: float) -> float:
    """Equation 2: from this T on, ``N C N_KV e / (2 N_H BW)``, attention hides the exchange of ring pass-KV."""
    return size * flops * shape.kv_row_bytes / (flops_per_pair(shape) * bandwidth)


def context_hiding_queries(shape: AttentionShape, *, size: int, flops: float, bandwidth: float) -> float:
    """Equation 3: from this T + P on, ``N e C / (4 BW)``, attention hides the exchange of ring pass-Q."""
    return size * flops * shape.query_row_bytes / (flops_per_pair(shape) * bandwidth)


def miss_rate_with_all_to_all(shape: AttentionShape, new: int, *, size: int, flops: float, bandwidth: float) -> float:
    """Equation 5: ``2 N_KV / N_H - 4 T BW / (N C e)``, the miss rate up to which pass-Q wins despite its All2All.

    As published: it takes partial outputs to have the type of Q, and D + 1 for D.
    """
    hidden = flops_per_pair(shape) * new * bandwidth / (size * flops * shape.query_row_bytes)
    return miss_rate_of_equal_bytes(shape) - hidden


# What the methods put on the wire


def sent_bytes(
    method: str,
    shape: AttentionShape,
    *,
    new: Sequence[int],
    kept: Sequence[int],
    rank: int,
    cached: Sequence[int] | None = None,
    wanted: Sequence[int] | None = None,
) -> dict[str, int]:
    """Bytes that a rank sends for one layer, by operation, exactly.

    method: ``pass_kv``, ``pass_q``, ``all_gather``, ``replicated``, ``runahead``, ``tsp`` or ``tsp_causal``;
        ``tensor`` attends as ``replicated`` does, and what its linears exchange is not counted.
    new, kept: per rank, the tokens whose queries it computes, and those whose keys and values it holds after the pass.
    cached: per rank, what it held before the pass, where that matters: ``runahead``. None: nothing.
    wanted: per rank, the tokens that results are asked for, for a last layer that leaves out the others: then they
        travel instead of keys and values, but for a collective, or a chain whose last rank keeps all keys and values.
    """
    size = len(kept)
    if size == 1:
        return {}
    held = cached or [0] * size
    if wanted is not None and method in ("pass_kv", "pass_q", "runahead"):
        gathered = any(after - before != count for after, before, count in zip(kept, held, new, strict=True))
        if method != "runahead" or not gathered:
            method, new, shape = "pass_q", wanted, shape.absorbed
    if method == "runahead":
        return _chain_bytes(shape, new=new, kept=kept, rank=rank, cached=held)
    if method in ("pass_kv", "pass_q"):
        tokens, row = (kept, shape.kv_row_bytes) if method == "pass_kv" else (new, shape.query_row_bytes)
        sent = {method: _ring_bytes(row, tokens, rank)}
        if method == "pass_q":
            sent["pass_q_return"] = (sum(new) - new[rank]) * shape.partial_row_bytes
        return sent
    if method in ("all_gather", "tsp", "tsp_causal"):
        return {"all_gather": (size - 1) * max(kept) * shape.kv_row_bytes}
    return {"replicated": (size - 1) * new[rank] * shape.partial_row_bytes}


def _ring_bytes(row_bytes: int, tokens: Sequence[int], rank: int) -> int:
    # A rank forwards every shard but the one that the next rank started with.
    return (sum(tokens) - tokens[(rank + 1) % len(tokens)]) * row_bytes


def _chain_bytes(
    shape: AttentionShape, *, new: Sequence[int], kept: Sequence[int], rank: int, cached: Sequence[int]
) -> dict[str, int]:
    """KV-Runahead, Equations 6 and 7: a rank sends the prefix up to its own tokens, if a rank behind wants it."""
    row = shape.kv_row_bytes
    # Keys and values that one rank of several gathers are wanted there, whoever computed them.
    end = max(index for index in range(len(new)) if new[index] or kept[index] > cached[index])
    prefix = new[: rank + 1] if rank < end else ()
    sent = {"runahead": sum(prefix) * row}
    if any(cached):
        sent["pass_kv"] = _ring_bytes(row, cached, rank)
    return sent


# KV-Runahead, Equations 4 to 7: tokens whose keys and values all ranks together send


def tsp_tokens(partition: Sequence[int]) -> int:
    """Equations 4 and 5: every rank's to all others, ``(p - 1) C`` however the prompt is cut."""
    return (len(partition) - 1) * sum(partition)


def chain_tokens(partition: Sequence[int]) -> int:
    """Equations 6 and 7: rank i sends the tokens of ranks 0 to i; ``(p - 1) C / 2`` where all have as many."""
    return sum(sum(partition[: rank + 1]) for rank in range(len(partition) - 1))


# Lower bounds of TTFT on p ranks (KV-Runahead, Sections 3 and 5), which no chain can undercut


def dense_bound(single_s: float, ranks: int) -> float:
    """Equation 3: ``TTFT*(p) = alpha C^2 (p + 1) / (2 p^2)``, alpha C^2 = TTFT(1), masked scores computed too."""
    return single_s * (ranks + 1) / (2 * ranks**2)


def causal_bound(single_s: float, ranks: int) -> float:
    """``TTFT(1) / p``, for kernels that skip masked scores."""
    return single_s / ranks


# A whole pass


def pass_bytes(
    model: ModelShape,
    workload: Workload,
    method: str,
    *,
    tp_size: int = 1,
    partitions: Sequence[Partition] | None = None,
) -> dict[str, int]:
    """Bytes by operation of the rank that sends most, all layers together; `partitions` are the chain's, per sequence.

    Cached tokens are spread evenly; so are new ones unless `partitions` says otherwise. With fewer than 2N of each
    sequence it is a step of decoding.
    """
    size, sequences = workload.size, len(workload.new)
    held = balanced_tokens(workload.cached, size)
    stored = _new_tokens(workload, partitions)
    new = [workload.total_new] * size if method in ("replicated", "tensor") else stored
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
            shape = shape.of_pass(workload.new, workload.cached, size)
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
    size = workload.size
    if partitions is not None:
        return rank_totals(partitions)
    if max(workload.new) < 2 * size:
        counts: list[int] = np.diff(chunk_bounds(workload.total_new, size)).tolist()
        return counts
    return balanced_tokens(workload.new, size)
