"""What rows on disk cost a layer: they come over the link no faster than the disk gives them.

Of every sequence the first tokens' rows lie in host memory, as many as have room there, and the others' on disk. So
what recomputing one more token saves the link depends on which one it is: costs differ from piece to piece of the split
points, within each of which they are those of a layer without a disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megakv.costmodel.offload import LayerCosts, link_rate, sending_seconds
from megakv.offload.division import spread


class Lot(NamedTuple):
    """Where the rows of one sequence lie in a layer, without those that stay on the accelerator.

    Parameters
    ----------
    tokens : int
    inputs : int
        The first ones, which have activations.
    rows_in_memory, inputs_in_memory : int
        The first ones whose keys and values, and whose activations, lie in host memory.
    """

    tokens: int
    inputs: int
    rows_in_memory: int
    inputs_in_memory: int

    @property
    def on_disk(self) -> bool:
        """Whether any rows lie on disk."""
        return self.rows_in_memory < self.tokens or self.inputs_in_memory < self.inputs


def placed(tokens: Sequence[int], memory_bytes: float, *, row_bytes: int, input_bytes: int = 0) -> tuple[Lot, ...]:
    """Where rows of each sequence come to lie in a layer, whose share of host memory takes what it has room for.

    What is smaller comes first: activations of all sequences, or keys and values beside larger ones, sequence by
    sequence. Pages are taken to be small.

    Parameters
    ----------
    tokens : sequence of int
        Of each sequence.
    memory_bytes : float
        The layer's share.
    row_bytes, input_bytes : int
        Of a token's keys and values, and of its activations; 0 where none are kept.
    """
    kinds = [(name, nbytes) for name, nbytes in (("x", input_bytes), ("kv", row_bytes)) if nbytes]
    order = [(name, nbytes, index) for index in range(len(tokens)) for name, nbytes in reversed(kinds)]
    if input_bytes < row_bytes:
        order = [(name, nbytes, index) for name, nbytes in kinds for index in range(len(tokens))]
    held = {}
    for name, nbytes, index in order:
        held[name, index] = min(tokens[index], int(memory_bytes // nbytes))
        memory_bytes -= held[name, index] * nbytes
    return tuple(
        Lot(count, count if input_bytes else 0, held["kv", index], held.get(("x", index), 0))
        for index, count in enumerate(tokens)
    )


class Piece(NamedTuple):
    """Split points between which every token costs alike.

    Parameters
    ----------
    first, last : int
        Both belong to it; the next piece begins where it ends.
    costs : LayerCosts
        As without a disk: of the piece's tokens. What others cost beyond that is in `head_s` and `tail_s`.
    """

    first: int
    last: int
    costs: LayerCosts


def disk_seconds(nbytes: float, link_bytes_s: float, disk_bytes_s: float) -> float:
    """Seconds of the link for bytes on disk: it reads one part while another is sent, so the slower one sets the pace.

    Parameters
    ----------
    nbytes : float
    link_bytes_s, disk_bytes_s : float
        Bandwidths; 0 where that of the disk is not known.
    """
    slower = min(link_bytes_s, disk_bytes_s) if disk_bytes_s else link_bytes_s
    return sending_seconds(nbytes, slower)


def shown_rates(
    nbytes: float, disk_nbytes: float, busy_s: float, link_bytes_s: float, disk_bytes_s: float
) -> tuple[float, float]:
    """Bandwidths of the link and of the disk as a transfer showed them, 0 where it did not.

    It shows that of the one that most of its time was spent on; the other is taken to be what it was.

    Parameters
    ----------
    nbytes, disk_nbytes : float
        Sent, and of them those that were read from disk.
    busy_s : float
    link_bytes_s, disk_bytes_s : float
        As known before.
    """
    memory_s = sending_seconds(nbytes - disk_nbytes, link_bytes_s)
    disk_s = disk_seconds(disk_nbytes, link_bytes_s, disk_bytes_s)
    if disk_s > memory_s:
        return 0.0, link_rate(disk_nbytes, busy_s - memory_s) if busy_s > memory_s else 0.0
    return link_rate(nbytes - disk_nbytes, busy_s - disk_s) if busy_s > disk_s else 0.0, 0.0


def pieces(costs: LayerCosts, lots: Sequence[Lot], on_host: int) -> list[Piece]:
    """Pieces of all split points of a group of sequences, ascending.

    Split points are spread over the sequences as `spread` does. Where that cannot be even, the sequences that one token
    more or less belongs to are taken to cost what they do in the mean.

    Parameters
    ----------
    costs : LayerCosts
    lots : sequence of Lot
        Of the group.
    on_host : int
        Tokens that the host attends to.
    """
    away = spread(on_host, [lot.rows_in_memory for lot in lots])
    rest = sum(lot.tokens for lot in lots) - on_host
    # By tokens of each sequence: where the next one of some sequence costs otherwise, or there is none.
    changes: dict[int, Counter[str]] = {}
    kept_s = 0.0
    for lot, gone in zip(lots, away, strict=True):
        memory = lot.rows_in_memory - gone
        kept_s += costs.kv_s * memory + costs.disk_kv_s * (lot.tokens - lot.rows_in_memory)
        limit = max(0, lot.inputs - gone)
        for name, count in (("kv", memory), ("x", lot.inputs_in_memory - gone)):
            count = min(max(0, count), limit)
            for level, kind, change in (
                (0, "memory", 1),
                (count, "memory", -1),
                (count, "disk", 1),
                (limit, "disk", -1),
            ):
                changes.setdefault(level, Counter())[f"{name} {kind}"] += change
    found: list[Piece] = []
    active: Counter[str] = Counter()
    split, sent_s = 0, 0.0
    levels = sorted(changes)
    for level, following in zip(levels, [*levels[1:], levels[-1]], strict=True):
        active.update(changes[level])
        sequences = active["kv memory"] + active["kv disk"]
        if not sequences:
            break
        kv_s = (active["kv memory"] * costs.kv_s + active["kv disk"] * costs.disk_kv_s) / sequences
        x_s = (active["x memory"] * costs.activation_s + active["x disk"] * costs.disk_activation_s) / sequences
        end = split + sequences * (following - level)
        before = found[-1] if found else None
        alike = replace(
            costs,
            kv_s=kv_s,
            activation_s=x_s,
            head_s=costs.head_s + sent_s - x_s * split,
            tail_s=costs.tail_s + kept_s + kv_s * (split - rest),
        )
        if before is not None and (before.costs.kv_s, before.costs.activation_s) == (kv_s, x_s):
            found[-1] = before._replace(last=end)
        else:
            found.append(Piece(split, end, alike))
        sent_s, kept_s, split = sent_s + x_s * (end - split), kept_s - kv_s * (end - split), end
    if not found:
        tail_s = costs.tail_s + kept_s - costs.kv_s * rest
        found.append(Piece(0, 0, replace(costs, tail_s=tail_s)))
    return found


def mean_costs(costs: LayerCosts, lots: Sequence[Lot], recomputed: int, on_host: int) -> LayerCosts:
    """Costs of a token in the mean of those that a division sends, and of those whose activations it sends."""
    piece = next(each for each in reversed(pieces(costs, lots, on_host)) if each.first <= recomputed)
    streamed = sum(lot.tokens for lot in lots) - on_host - recomputed
    own = piece.costs
    kept_s = own.tail_s - costs.tail_s + own.kv_s * streamed
    sent_s = own.head_s - costs.head_s + own.activation_s * recomputed
    return replace(
        costs,
        kv_s=kept_s / streamed if streamed else costs.kv_s,
        activation_s=sent_s / recomputed if recomputed else costs.activation_s,
    )
