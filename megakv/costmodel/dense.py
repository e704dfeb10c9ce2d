"""Predicted seconds of what a model computes token by token: projections, feed-forward, and what lies between."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import LayerShape, ModelShape

SUMS = 2
"""All-reduces of a layer."""


@dataclass(frozen=True)
class Passes:
    """How often a decoder layer reads and writes tensors beside its matrix products and attention."""

    hidden: float  # Over the hidden width: norms and residuals.
    rotary: float  # Over queries and keys: their rotary embedding.
    gated: float  # Over the feed-forward's width: activation and gate; without a gate the activation.
    plain: float


TRANSFORMERS = Passes(hidden=8, rotary=5, gated=4, plain=2)
"""One small operation after the other."""
FUSED = Passes(hidden=4, rotary=1, gated=1.5, plain=1)
"""Every input is read once, every output written once; a norm also writes the residual that it adds."""
HELD_HIDDEN = 3
"""Tensors of the hidden width that a layer holds at a time."""
FILLED = 0.5
"""Of a pass: zeros are written, and nothing is read."""


def dense_seconds(profile: HardwareProfile, layer: LayerShape, tokens: float, *, tp_size: int = 1) -> float:
    """Seconds of a layer's projections and feed-forward for `tokens` tokens on one rank."""
    experts = layer.experts if layer.fp8_experts else 0
    in_fp8 = replace(layer, dense=layer.fp8, experts=experts)
    others = replace(layer, dense=layer.dense - layer.fp8, experts=layer.experts - experts)
    parts = (in_fp8, profile.matmul_fp8 or profile.matmul), (others, profile.matmul)
    touched = [(part, part.touched(tokens), curve) for part, curve in parts]
    return sum(each / tp_size * curve.at(part.multiplied(tokens) / each) for part, each, curve in touched if each)


class TokenTimes:
    """Seconds of one rank outside attention, sums over tensor-parallel ranks included, in a pass over a prompt.

    shared_memory: whether they sum by DeepSpeed's shared-memory operation.
    head_ranks: ranks that the output head is cut over, which MegaKV leaves whole.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        model: ModelShape,
        *,
        tp_size: int = 1,
        shared_memory: bool = False,
        head_ranks: int = 1,
    ):
        self._profile = profile
        self._head_ranks = head_ranks
        self._model = model
        self._tp_size = tp_size
        self._shared_memory = shared_memory
        self._counts = FUSED if model.fused else TRANSFORMERS

    def before(self, layer: int, tokens: float, *, wanted: float | None = None) -> float:
        """Norm, projections to queries, keys and values, and their rotary embedding: what precedes attention.

        With `wanted` as for `after`, the last layer projects no other queries.
        """
        queries, kv = self._query_width / self._tp_size, self._kv_width / self._tp_size
        asked = round(self._inputs * self._query_width / (self._query_width + self._kv_width))
        seconds = self._matrices(asked, self._rows(layer, tokens, wanted))
        seconds += self._matrices(self._inputs - asked, tokens)
        seconds += self._passes(self._counts.hidden / 2, tokens, self._model.hidden)
        # Of keys and values the keys are rotated; then both are stored.
        rotary = self._counts.rotary
        seconds += self._passes(rotary, tokens, queries) + self._passes(rotary / 2 + 1, tokens, kv)
        seconds += self._filled(layer, tokens, wanted, queries)
        return seconds + self._pages(tokens, queries + kv) + self._profile.issue_s + self._profile.added.layer_s

    def after(self, layer: int, tokens: float, *, wanted: float | None = None) -> float:
        """Output projection and feed-forward: what follows attention.

        wanted: tokens whose logits are asked for: the matrices of the last layer leave out the others, experts do not,
            and between matrices these are zero, see `megakv.forward.last_layer`.
        """
        shape, model = self._model.layers[layer], self._model
        asked = self._rows(layer, tokens, wanted)
        rows = tokens if shape.experts else asked
        seconds = self._matrices(self._outputs, asked) + self.feed_forward(layer, rows)
        gate = model.intermediate * shape.active_experts / self._tp_size
        gates = self._counts.gated if model.feed_forward_tensors == 3 else self._counts.plain
        between = rows if model.fused else tokens
        seconds += self._passes(self._counts.hidden / 2, tokens, model.hidden) + self._passes(gates, between, gate)
        queries = self._query_width / self._tp_size
        seconds += self._passes(1, tokens, queries)
        # Attention's output, the projection of it, and what the feed-forward's matrices give.
        outputs = queries + model.hidden
        if not shape.experts:
            outputs += (model.feed_forward_tensors - 1) * gate + model.hidden
        seconds += self._filled(layer, tokens, wanted, outputs) + self.sums(layer, tokens, wanted=wanted)
        seconds += self._pages(tokens, model.hidden)
        return seconds if model.fused else seconds + self._pages(tokens, model.hidden + gates * gate)

    def feed_forward(self, layer: int, tokens: float) -> float:
        """Its matrices, or experts, alone."""
        shape = self._model.layers[layer]
        other = max(0, shape.dense - self._inputs - self._outputs)
        rest = replace(shape, dense=other, fp8=min(shape.fp8, other))
        some = rest.dense or rest.experts
        return dense_seconds(self._profile, rest, tokens, tp_size=self._tp_size) if some else 0.0

    def projections(self, tokens: float) -> tuple[float, float, float]:
        """Seconds of the matrices before and behind attention, and the outputs of the first, per token."""
        width = (self._query_width + self._kv_width) / self._tp_size
        return self._matrices(self._inputs, tokens), self._matrices(self._outputs, tokens), width

    def sums(self, layer: int, tokens: float, *, wanted: float | None = None) -> float:
        """What of `after` is sums over tensor-parallel ranks."""
        asked = self._rows(layer, tokens, wanted)
        return self._summed(asked) + self._summed(tokens if self._model.layers[layer].experts else asked)

    def layer(self, layer: int, tokens: float, *, wanted: float | None = None) -> float:
        return self.before(layer, tokens, wanted=wanted) + self.after(layer, tokens, wanted=wanted)

    def of_head(self, tokens: float) -> float:
        """What of a layer each KV head takes, with its query heads, on a rank that has it: its part of projections and
        rotary embeddings.
        """
        model, rotary = self._model, self._counts.rotary
        weights = (self._inputs + self._outputs) * self._profile.matmul.at(tokens)
        passed = (rotary + 1) * self._query_width + (rotary / 2 + 1) * self._kv_width
        moved = tokens * passed * model.element_bytes / self._profile.copy_bytes.bandwidth
        return (weights + moved) / model.kv_heads

    def beside(self, sequences: int, *, lag: float, shared: int = 0) -> float:
        """A decoding step beside its layers: the logits, of which the last rank is late by a part, and `generate`."""
        return lag * self.head(sequences) + self.end(sequences, shared=shared) + self.step_s

    def head(self, sequences: int) -> float:
        """The output head, or a rank's part of it."""
        model = self._model
        return model.vocab * model.hidden / self._head_ranks * self._profile.matmul.at(sequences)

    def end(self, sequences: int, *, shared: int = 0) -> float:
        """The logits, what a pass takes beside its layers, and how often one rank's results are told to all."""
        around = self._profile.pass_s + self._profile.added.pass_s
        return self.head(sequences) + around + shared * self._profile.share_s

    @property
    def step_s(self) -> float:
        """What `generate` takes for a token beside its pass."""
        return self._profile.step_s + self._profile.added.step_s

    def _summed(self, tokens: float) -> float:
        """The all-reduce behind a projection whose weights are cut along its inputs."""
        nbytes = tokens * self._model.hidden * self._model.element_bytes
        return all_reduce_seconds(self._profile, nbytes, self._tp_size, shared_memory=self._shared_memory)

    def late_s(self, sequences: int) -> float:
        """How much later the last of all ranks is with a pass: they read all weights at once, and not equally fast."""
        layers = sum(count * (self.layer(index, 1) - self.sums(index, 1)) for index, count in self._model.layer_kinds)
        return self._profile.lag * (layers + self.head(sequences))

    def first_s(self, tokens: float) -> float:
        """What a layer's memory costs once, in a process that has none to use again, beside what every layer pays."""
        held = self._held(tokens)
        return max(0.0, self._profile.page_s * held - self._new(held))

    def _filled(self, layer: int, tokens: float, wanted: float | None, width: float) -> float:
        """Zeros in place of what the last layer leaves out, which the model's next operation takes."""
        left_out = tokens - self._rows(layer, tokens, wanted)
        return 0.0 if self._model.fused else self._passes(FILLED, left_out, width)

    def _rows(self, layer: int, tokens: float, wanted: float | None) -> float:
        """Tokens that a layer computes where so many are wanted of the last one."""
        return tokens if wanted is None or layer < len(self._model.layers) - 1 else wanted

    @property
    def _query_width(self) -> int:
        return self._model.heads * self._model.key_dim

    @property
    def _kv_width(self) -> int:
        return self._model.kv_heads * (self._model.key_dim + self._model.value_dim)

    @cached_property
    def _inputs(self) -> int:
        """Weights of the projections to queries, keys and values; low-rank ones have no more than there are."""
        return min(self._model.hidden * (self._query_width + self._kv_width), self._least // 2)

    @cached_property
    def _outputs(self) -> int:
        return min(self._model.hidden * self._model.heads * self._model.value_dim, self._least // 2)

    @cached_property
    def _least(self) -> int:
        return min(layer.dense for layer in self._model.layers)

    def _matrices(self, elements: int, tokens: float) -> float:
        return dense_seconds(self._profile, LayerShape(elements), tokens, tp_size=self._tp_size) if elements else 0.0

    def _passes(self, count: float, tokens: float, width: float) -> float:
        return count * self._profile.copy_bytes.at(tokens * width * self._model.element_bytes)

    def _pages(self, tokens: float, width: float) -> float:
        """What it costs that results are written to memory newly asked for.

        It grows with all that a layer holds at a time: once a C library has handed so much back to the system, every
        page of the next tensor is new, however small the tensor.
        """
        return self._new(self._held(tokens)) * width / self._widths

    @property
    def _widths(self) -> float:
        """Elements per token that a layer holds at a time."""
        model = self._model
        if model.fused:
            return HELD_HIDDEN * model.hidden + (self._query_width + self._kv_width) / self._tp_size
        return HELD_HIDDEN * model.hidden + model.feed_forward_tensors * model.intermediate / self._tp_size

    def _held(self, tokens: float) -> float:
        return tokens * self._widths * self._model.element_bytes

    def _new(self, held: float) -> float:
        return max(0.0, self._profile.copy_fresh.at(held) - self._profile.copy_bytes.at(held))


def all_reduce_seconds(profile: HardwareProfile, nbytes: float, ranks: int, *, shared_memory: bool = False) -> float:
    """Seconds of summing a tensor over ranks, as they were measured, if they were; neighbours fill hosts one by one.

    Worked out, over several hosts each rank first sums its part inside its host, then with the same part of the others,
    each over its own link, and gathers inside again; large tensors go in pieces, so that both kinds of links are busy
    at once. A profile measured on several hosts does not know the links inside them: nothing is counted then.
    """
    if ranks < 2 or nbytes <= 0:
        return 0.0
    measured = profile.sum_times(ranks, shared_memory=shared_memory) or profile.sum_times(ranks)
    if measured is not None:
        return measured.seconds.at(nbytes) + measured.wait_s
    inside = profile.exchange_inside
    if inside is None and profile.fingerprint.hosts == 1:
        inside = profile.exchange
    if inside is None:
        return 0.0
    local = min(ranks, profile.devices_per_host or ranks)
    hosts = -(-ranks // local)
    near, near_wait = _summed(inside, nbytes, local)
    far, far_wait = _summed(profile.exchange_collective or profile.exchange, nbytes / local, hosts)
    return max(near + far_wait, far + near_wait)


def _summed(link: Curve, nbytes: float, ranks: int) -> tuple[float, float]:
    """Seconds over one kind of link, and what of them its latency alone takes.

    Scattering the sums and gathering them, either in a ring, or by exchanging ever smaller halves: twice the logarithm
    of messages in place of twice the number of ranks, but each at once to one other rank. The faster one counts.
    """
    if ranks < 2:
        return 0.0, 0.0
    ring = [nbytes / ranks] * (ranks - 1)
    halves = [nbytes / 2 ** (level + 1) for level in range(math.ceil(math.log2(ranks)))]
    return min((2 * sum(map(link.at, sizes)), 2 * len(sizes) * link.latency) for sizes in (ring, halves))


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """What each rank sends in such a ring: its parts twice, once as sums under way and once as sums."""
    return 2 * (ranks - 1) * nbytes // ranks if ranks > 1 else 0
