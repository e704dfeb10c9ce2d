"""Whole decoder layers of a step of decoding, or of a short prompt, in one compiled call, with all that ranks exchange.

Between calls Python takes as long as they do, on every rank at its own pace, and each waits for the others.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megakv.attention.compiled import DecodeKernel, RowTables, located
from megakv.attention.layer import LayerCalls
from megakv.attention.step import TokenStep
from megakv.base.library import fault
from megakv.distributed.channel import Channel
from megakv.distributed.direct import MESSAGE_BYTES

PARTS = ("inputs", "attention", "partial", "outputs", "feed_forward")
"""What of a layer is timed, by the call's numbers: attention, and messages."""
MESSAGES = tuple(name for name in PARTS if name != "attention")


@dataclass(frozen=True)
class LayerRanks:
    """What ranks divide of a layer, and the channels that they exchange it through; None where each has all of it."""

    inputs: Channel | None = None
    """Gathers queries, keys and values, of which each has a run of `widths` columns."""
    partial: Channel | None = None
    """Gathers attention to each one's own tokens; of a prompt that is spread, keys and values."""
    outputs: Channel | None = None
    """Sums output projections, each from `columns` of what was attended to; behind it `outputs_bias` is added."""
    feed_forward: Channel | None = None
    """Sums what each one's part of the feed-forward makes; behind it `feed_forward_bias` is added."""
    widths: Sequence[int] = ()
    columns: tuple[int, int] = (0, 0)
    outputs_bias: Tensor | None = None
    feed_forward_bias: Tensor | None = None


class Moment(NamedTuple):
    """A part of a layer: its name in `PARTS`, the bytes that this rank sent, and seconds since the call began."""

    part: str
    sent: int
    begin: float
    end: float


class _Ranks(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, ctypes.c_void_p) for name in MESSAGES),
        ("widths", ctypes.POINTER(ctypes.c_int64)), ("width_count", ctypes.c_int64),
        ("first", ctypes.c_int64), ("columns", ctypes.c_int64),
        ("outputs_bias", ctypes.c_void_p), ("outputs_biases", ctypes.c_int64),
        ("feed_forward_bias", ctypes.c_void_p), ("feed_forward_biases", ctypes.c_int64),
    ]  # fmt: skip


class _WholeLayer(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("layer", ctypes.c_void_p), ("ranks", ctypes.c_void_p), ("scale", ctypes.c_double),
    ]  # fmt: skip


class WholeLayer:
    """One layer for it: its weights and channels, which must stay where they are, and what scores are multiplied by."""

    def __init__(self, calls: LayerCalls, ranks: LayerRanks, scale: float):
        self.calls, self.scale, self._ranks, weights = calls, scale, ranks, calls.weights
        found: dict[str, Channel | None] = {name: getattr(ranks, name) for name in MESSAGES}
        self.channels = {name: channel for name, channel in found.items() if channel is not None}
        first, end = ranks.columns
        addresses = (None if channel is None else channel.address for channel in found.values())
        widths, biases = (
            (ctypes.c_int64 * len(ranks.widths))(*ranks.widths),
            (ranks.outputs_bias, ranks.feed_forward_bias),
        )
        self._plan = _Ranks(*addresses, widths, len(widths), first, end - first, *chain(*map(located, biases)))
        self.address = ctypes.addressof(self._plan)
        size, hidden = calls.dtype.itemsize, calls.hidden
        row = {
            "inputs": max(ranks.widths, default=0) * size,
            "partial": weights.heads * (weights.head_dim + 1) * torch.float32.itemsize,
            "outputs": hidden * size,
            "feed_forward": hidden * size,
        }
        # What this rank sends of each row, to all others together.
        sent = {name: row[name] * (len(channel.ranks) - 1) for name, channel in self.channels.items()}
        timed = [name for name in PARTS if name in sent or name == "attention"]
        self.timed = [(PARTS.index(name), name, sent.get(name, 0)) for name in timed]
        """What of it is timed: numbers and names of parts, and the bytes that this rank sends of each row."""
        self.few = DecodeKernel.few(weights.heads // weights.kv_heads, 1) and scale > 0
        """Whether the kernel for attention is for so many heads, and such scores."""
        shape = (weights.kv_heads, 1, weights.head_dim)
        self.like = torch.empty(shape, dtype=calls.dtype, device="cpu")
        """Keys, or values, of a row: the kind."""

    def message_bytes(self, rows: int) -> int:
        """Bytes of so many rows' keys and values."""
        return 2 * self.like.numel() * self.like.itemsize * rows

    def fits(self, other: WholeLayer) -> bool:
        """Whether the other one's hidden states and rotary embeddings are of the same type and shape."""
        mine, theirs = self.calls, other.calls
        same = mine.dtype == theirs.dtype and mine.hidden == theirs.hidden
        return same and mine.weights.head_dim == theirs.weights.head_dim


class WholeLayersCall:
    """That of layers of one type and width that follow one another."""

    def __init__(self, layers: Sequence[WholeLayer]):
        self.layers, self._call = layers, layers[0].calls.kernel.token_layers
        channels = {id(channel): channel for layer in layers for channel in layer.channels.values()}
        self._channels: list[Channel] = list(channels.values())
        self.ranks = sorted({rank for channel in self._channels for rank in channel.ranks})
        """Of the world, those that it exchanges messages with, itself included; none where it is alone."""
        plans = [_WholeLayer(layer.calls.address, layer.address, layer.scale) for layer in layers]
        self._plans = (_WholeLayer * len(plans))(*plans)
        shapes = {layer.like.shape for layer in layers}
        self.like = layers[0].like if len(shapes) == 1 else None
        """Keys, or values, of a row, where all layers have the same."""
        self._at = array("d", (0.0,) * (2 * len(PARTS) * len(plans)))

    def sends(self, rows: int) -> bool:
        """Whether ranks can send each other so many rows' keys and values, by the way of small messages."""
        every = (layer.message_bytes(rows) for layer in self.layers)
        return bool(self.ranks) and max(every) <= MESSAGE_BYTES

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: TokenStep,
        tables: RowTables,
        window: int | None,
        picked: Tensor | None = None,
    ) -> tuple[Tensor, list[list[Moment]]]:
        """``[..., L, h]`` of hidden states ``[..., L, h]`` and rotary embeddings ``[..., L, D]``, and what each layer
        spent its time with.

        `tables` say where rows lie, of every layer or of the first ones, which alone are computed then. Where some rows
        are `picked`, ascending, the last layer computes those alone, and zeros for others.

        Raises
        ------
        DistNetworkError
            If another rank's connection is over, or nothing came in time.
        """
        out, rows, calls = torch.empty_like(x), x.numel() // x.shape[-1], self.layers[0].calls
        assert x.shape[-1] == calls.hidden and cos.numel() == sin.numel() == rows * calls.weights.head_dim
        held, spread = step.held(tables, window), step.spread(window)
        if code := self._call(
            ctypes.addressof(self._plans), len(self._plans), held.ctypes.data, spread and spread.address,
            *located(picked), len(tables), rows, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), step.threads,
            out.data_ptr(), self._at.buffer_info()[0],
        ):  # fmt: skip
            for channel in self._channels:
                channel.check()
            raise fault(code, "activations of layers")
        moments, at = [], self._at.tolist()
        for first, layer in zip(range(0, len(at), 2 * len(PARTS)), self.layers[: len(tables)], strict=False):
            places = ((name, sent * rows, first + 2 * part) for part, name, sent in layer.timed)
            found = [Moment(name, sent, at[place], at[place + 1]) for name, sent, place in places]
            if spread is not None:
                sent = layer.message_bytes(spread.rows) * (len(layer.channels["partial"].ranks) - 1)
                # There the message comes first, in steps the attention that it is of.
                found = [each._replace(part="keys", sent=sent) if each.sent else each for each in reversed(found)]
            moments.append(found)
        return out, moments
