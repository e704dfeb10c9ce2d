"""Seconds of one layer whose keys and values lie off the accelerator (KVPR, Equations 6 to 10), and past the paper.

Of ``s'`` cached tokens a layer recomputes ``l`` from their activations, lets the host's processor attend to ``a`` where
they lie, and is sent the keys and values of the others. Counts of tokens may be arrays: then every pair is priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Counts = Any
"""Tokens, an integer or an array of them; seconds are of the same shape."""


@dataclass(frozen=True)
class LayerPrices:
    """Prices of one layer at one step, in seconds; per token means per cached token of all sequences."""

    # Sending a token's keys and values, ``2 kv_dim p / v_com``, and its activations, ``h p / v_com`` (Equation 6 with
    # kv_dim in place of h where it is narrower).
    kv_s: float
    activation_s: float
    recompute_s: float  # A token's keys and values: ``4 h kv_dim / v_gpu`` (Equations 8 and 9).
    # What each transfer and each recomputation costs whatever its size.
    transfer_s: float = 0.0
    launch_s: float = 0.0
    # All other work of the layer on the accelerator, but for attending to cached tokens; and that, for each.
    device_s: float = 0.0
    attend_s: float = 0.0
    # Attending to a token on the host, and what doing so at all costs.
    host_attend_s: float = 0.0
    host_fixed_s: float = 0.0
    # As `kv_s` and `activation_s`, of a token whose rows lie on disk.
    disk_kv_s: float = 0.0
    disk_activation_s: float = 0.0
    # Sending weights before the activations, and weights beside the keys and values, where weights are offloaded.
    head_s: float = 0.0
    tail_s: float = 0.0

    @classmethod
    def of_machine(
        cls, *, hidden: int, kv_dim: int, element_bytes: int, link_bytes_s: float, flops_s: float, batch: int = 1
    ) -> Self:
        """The paper's form: by v_com and v_gpu alone, `l` counting tokens of each of `batch` equal sequences."""
        return cls(
            kv_s=2 * batch * kv_dim * element_bytes / link_bytes_s,
            activation_s=batch * hidden * element_bytes / link_bytes_s,
            recompute_s=4 * batch * hidden * kv_dim / flops_s,
        )

    def with_weights(self, weights: WeightTimes, groups: int) -> Self:
        """With weights offloaded too.

        Row by row W_K and W_V come first, so that recomputation need not wait for the others (Figure 5b). Column by
        column the next layer's weights come in as many pieces as groups share them (Algorithm 1).
        """
        if groups == 1:
            return replace(self, head_s=weights.keys_s, tail_s=weights.others_s)
        return replace(self, head_s=0.0, tail_s=(weights.keys_s + weights.others_s) / groups)


@dataclass(frozen=True)
class WeightTimes:
    """Seconds of sending a layer's weights: W_K and W_V, which come first (Figure 5b), and all others."""

    keys_s: float = 0.0
    others_s: float = 0.0


RESIDENT = WeightTimes()
"""Weights that stay on the accelerator."""


class Placement(NamedTuple):
    """Where the rows of one sequence lie in a layer, without those that stay on the accelerator.

    Of `tokens`, the first `inputs` have activations; keys and values of the first `rows_in_memory`, and activations of
    the first `inputs_in_memory`, lie in host memory, and all others on disk.
    """

    tokens: int
    inputs: int
    rows_in_memory: int
    inputs_in_memory: int

    @property
    def on_disk(self) -> bool:
        """Whether any rows lie on disk."""
        return self.rows_in_memory < self.tokens or self.inputs_in_memory < self.inputs


@dataclass(frozen=True)
class GroupPrices:
    """A layer's prices, and what it has cached of one group of sequences.

    Of `tokens`, s', `inputs` have activations, the host may attend to `host`, and `resident` never leave the
    accelerator. `chunk` is the number of tokens of a chunk of activations; `placements` say where sequences' rows lie,
    if some do on disk. Beside them compression has `kept` as much as so many tokens, `kept_on_disk` of that on disk:
    it is sent, so its time is a constant, as that of weights, unless the host attends to all of it (`kept_on_host`).
    """

    layer: LayerPrices
    tokens: int
    inputs: int = 0
    host: int = 0
    resident: int = 0
    chunk: int = 256
    placements: tuple[Placement, ...] = ()
    kept: float = 0.0
    kept_on_disk: float = 0.0
    kept_on_host: bool = False

    @property
    def kept_s(self) -> float:
        """Seconds of the link for what compression has kept."""
        if self.kept_on_host:
            return 0.0
        return self.layer.kv_s * (self.kept - self.kept_on_disk) + self.layer.disk_kv_s * self.kept_on_disk

    @property
    def kept_here(self) -> float:
        """Of what compression has kept, what the accelerator attends to."""
        return 0.0 if self.kept_on_host else self.kept

    @property
    def away(self) -> int:
        """Tokens that lie off the accelerator."""
        return self.tokens - self.resident

    def sent_seconds(self, recomputed: Counts, on_host: Counts = 0) -> tuple[Any, Any]:
        """Of the link: for activations, and for the keys and values of all other tokens, compressed ones included.

        In each sequence the host's tokens come first, then those recomputed. What lies on disk comes at its own rate;
        where tokens cannot be divided evenly among sequences, each gives a fraction of one.
        """
        prices = self.layer
        if not self.placements:
            return prices.activation_s * recomputed, prices.kv_s * (self.away - on_host - recomputed) + self.kept_s
        tokens, inputs, rows, held = np.array(self.placements, dtype=np.float64).T
        first = _shares(on_host, rows)
        last = first + _shares(recomputed, np.maximum(0, inputs - first))
        from_memory = (np.minimum(last, held) - np.minimum(first, held)).sum(axis=-1)
        from_disk = (np.maximum(last, held) - np.maximum(first, held)).sum(axis=-1)
        kv_memory, kv_disk = np.maximum(0, rows - last).sum(axis=-1), (tokens - np.maximum(rows, last)).sum(axis=-1)
        return (
            prices.activation_s * from_memory + prices.disk_activation_s * from_disk,
            prices.kv_s * kv_memory + prices.disk_kv_s * kv_disk + self.kept_s,
        )

    def link_seconds(self, recomputed: Counts, on_host: Counts = 0) -> Any:
        """A layer's work on the link."""
        prices = self.layer
        inputs_s, rows_s = self.sent_seconds(recomputed, on_host)
        transfers = -(-recomputed // self.chunk) + ((recomputed + on_host < self.away) | (self.kept_here > 0))
        return prices.head_s + prices.tail_s + prices.transfer_s * transfers + inputs_s + rows_s

    def recompute_seconds(self, recomputed: Counts) -> Any:
        """A layer's recomputation."""
        return self.layer.launch_s * -(-recomputed // self.chunk) + self.layer.recompute_s * recomputed

    def attend_seconds(self, on_host: Counts = 0) -> Any:
        """Attention to cached tokens on the accelerator."""
        return self.layer.attend_s * (self.tokens + self.kept_here - on_host)

    def host_seconds(self, on_host: Counts) -> Any:
        """Attention on the host."""
        on_host = on_host + self.kept - self.kept_here
        return (on_host > 0) * (self.layer.host_fixed_s + self.layer.host_attend_s * on_host)

    def device_seconds(self, recomputed: Counts, on_host: Counts = 0) -> Any:
        """A layer's work on the accelerator.

        A layer's queries are known once it has recomputed: unlike transfers, the host's part cannot run ahead.
        """
        attended_s = np.maximum(self.attend_seconds(on_host), self.host_seconds(on_host))
        return self.layer.device_s + self.recompute_seconds(recomputed) + attended_s

    def steady_seconds(self, recomputed: Counts, on_host: Counts = 0) -> Any:
        """Seconds between two layers in the middle of many: the busier of link and accelerator sets the pace."""
        return np.maximum(self.link_seconds(recomputed, on_host), self.device_seconds(recomputed, on_host))


def _shares(total: Counts, limits: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[..., S]`` parts of totals ``[...]``, all of one size but for those that their limits make smaller."""
    ordered, left = np.sort(limits, axis=-1), np.arange(limits.shape[-1], 0, -1)
    before = np.cumsum(ordered, axis=-1) - ordered
    # Those with the smallest limits are full; the others divide the rest.
    total = np.asarray(total)[..., None]
    full = np.minimum((before + ordered * left < total).sum(axis=-1, keepdims=True), limits.shape[-1] - 1)
    before = np.broadcast_to(before, (*full.shape[:-1], limits.shape[-1]))
    return np.minimum(limits, (total - np.take_along_axis(before, full, axis=-1)) / left[full])


def placed(
    tokens: Sequence[int], memory_bytes: float, *, row_bytes: float, input_bytes: float = 0
) -> tuple[Placement, ...]:
    """Where rows of each sequence come to lie in a layer whose share of host memory is `memory_bytes`.

    What is smaller comes first: activations of all sequences, or keys and values beside larger ones, sequence by
    sequence. Pages are taken to be small. With `input_bytes` of 0 no activations are kept.
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
        Placement(count, count if input_bytes else 0, held["kv", index], held.get(("x", index), 0))
        for index, count in enumerate(tokens)
    )


def group_prices(
    prices: LayerPrices,
    placements: Sequence[Placement],
    *,
    attends: bool,
    chunk: int = 256,
    tokens: int | None = None,
) -> GroupPrices:
    """Prices of a group whose rows lie so: of all its `tokens`, those that are not placed stay on the accelerator."""
    away = sum(placement.tokens for placement in placements)
    tokens = away if tokens is None else tokens
    return GroupPrices(
        prices,
        tokens,
        inputs=sum(placement.inputs for placement in placements),
        host=sum(placement.rows_in_memory for placement in placements) if attends else 0,
        resident=tokens - away,
        chunk=chunk,
        placements=tuple(placements) if any(placement.on_disk for placement in placements) else (),
    )


def disk_seconds(nbytes: float, link_bytes_s: float, disk_bytes_s: float) -> float:
    """Seconds of the link for bytes on disk, at the slower of both rates; 0 of the disk's: it is not known."""
    return nbytes / (min(link_bytes_s, disk_bytes_s) if disk_bytes_s else link_bytes_s)
