"""Predicted TTIT of tensor-parallel ranks that hold KV heads as a mapping says, each with its own number of tokens.

A layer takes as long as its slowest rank: every head costs a fixed part on each rank that holds it (its weights are
read there, copies too, and attention turns to it), and a part that replicas share (its kept tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from megakv.costmodel.dense import TokenTimes, all_reduce_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.kernels import ragged_call
from megakv.costmodel.shape import ModelShape

LSE_BYTES = 4
INSTANT = 1e-18
"""Seconds of a token where none are known."""


class PlacedHeads(Protocol):
    """A layer's KV heads: the ranks of each, and what part of its tokens each of those attends to."""

    @property
    def ranks(self) -> Sequence[Sequence[int]]: ...

    @property
    def shares(self) -> Sequence[Sequence[float]]: ...


class RankWork(NamedTuple):
    """What a rank has of a layer: KV heads, or parts of one, and tokens that it attends to, of one sequence and all
    these heads.
    """

    heads: float
    tokens: float


def rank_works(placed: PlacedHeads, kept: Sequence[float], ranks: int) -> list[RankWork]:
    """Of every rank, where the heads keep so many tokens of a sequence."""
    heads, tokens = [0] * ranks, [0.0] * ranks
    for held, shares, budget in zip(placed.ranks, placed.shares, kept, strict=True):
        for rank, share in zip(held, shares, strict=True):
            heads[rank] += 1
            tokens[rank] += share * budget
    return [RankWork(*work) for work in zip(heads, tokens, strict=True)]


def shared_entries(placed: PlacedHeads) -> int:
    """Replicas of heads that several ranks hold: each tells the others its log-sum-exps."""
    return sum(len(held) for held in placed.ranks if len(held) > 1)


@dataclass(frozen=True)
class LayerCosts:
    """Seconds of one layer in one decoding step."""

    head_s: float  # Of a KV head on each rank that holds it, and of each token that a head keeps of a sequence.
    token_s: float
    alike_s: float  # What all ranks do alike.
    jitter: float = 0.0  # How much later the last of equally loaded ranks is, as a part of what they do.
    least_s: float = 0.0  # No layer takes less.

    def rank_seconds(self, work: RankWork) -> float:
        """What the heads of a rank take there."""
        return work.heads * self.head_s + work.tokens * self.token_s

    def slowest(self, works: Sequence[RankWork]) -> float:
        """What the ranks' heads take until the last rank is done."""
        seconds = [self.rank_seconds(work) for work in works]
        return max(max(seconds), (1 + self.jitter) * sum(seconds) / len(seconds))

    def seconds(self, works: Sequence[RankWork], shared_s: float = 0.0) -> float:
        """The whole layer; `shared_s` is what it takes that some ranks share heads."""
        return max(self.least_s, self.alike_s + self.slowest(works) + shared_s)


class HeadTimes:
    """Predictions for one model on `tp_size` tensor-parallel ranks that decode `batch` sequences.

    shared_memory: whether they sum by DeepSpeed's shared-memory operation.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        model: ModelShape,
        *,
        tp_size: int,
        batch: int = 1,
        shared_memory: bool = False,
    ):
        if batch < 1 or tp_size < 1:
            raise ValueError(f"batch = {batch}, tp_size = {tp_size}: allowed: 1 or more of each")
        if model.latent is not None:
            raise ValueError("the model caches latents, one head for all ranks: there are no heads to place")
        self.profile, self.model, self.tp_size, self.batch = profile, model, tp_size, batch
        self._shared_memory = shared_memory
        self._call = ragged_call(profile, model.attention())
        self._dense = TokenTimes(profile, model, tp_size=tp_size, shared_memory=shared_memory)
        self._lag = profile.lag if tp_size > 1 else 0.0
        self._costs = {index: self._layer_costs(index) for index, _ in model.layer_kinds}

    def with_batch(self, batch: int) -> HeadTimes:
        """The same for another number of sequences."""
        return HeadTimes(
            self.profile,
            self.model,
            tp_size=self.tp_size,
            batch=batch,
            shared_memory=self._shared_memory,
        )

    def costs(self, layer: int) -> LayerCosts:
        return self._costs[self._kinds[layer]]

    def head_tokens(self) -> tuple[float, ...]:
        """By layer, as many kept tokens as take as long as a KV head takes without any."""
        return tuple(costs.head_s / max(costs.token_s, INSTANT) for costs in map(self.costs, range(len(self._kinds))))

    def attention(self, works: Sequence[RankWork]) -> float:
        """Seconds of a layer's attention alone, without exchanges, until the last rank is done."""
        return self._attention.seconds(works)

    def shared_s(self, entries: int) -> float:
        """What a layer takes that so many replicas of shared heads exchange log-sum-exps and weigh their outputs."""
        if not entries:
            return 0.0
        rows = entries * self._group * self.batch
        return self.summed_s(rows * LSE_BYTES) + self.profile.combine.at(rows * self.model.value_dim)

    def summed_s(self, nbytes: float) -> float:
        """A sum over the ranks."""
        return all_reduce_seconds(self.profile, nbytes, self.tp_size, shared_memory=self._shared_memory)

    def layer_seconds(self, layer: int, placed: PlacedHeads, kept: Sequence[float]) -> float:
        """A layer under a placement of its heads, of which each keeps so many tokens of a sequence."""
        works = rank_works(placed, kept, self.tp_size)
        return self.costs(layer).seconds(works, self.shared_s(shared_entries(placed)))

    @property
    def beside_s(self) -> float:
        """A step beside its layers, whose end all ranks hear of from the first one."""
        shared = 1 if self.tp_size > 1 else 0
        return self._dense.beside(self.batch, lag=self._lag, shared=shared)

    def step_seconds(self, placed: Sequence[PlacedHeads], kept: Sequence[Sequence[float]]) -> float:
        """TTIT, of all layers ``placed[layer]`` whose heads keep ``kept[layer][head]`` tokens of a sequence.

        Raises ValueError for another number of layers than the model's.
        """
        self.check(len(kept), len(kept[0]))
        layers = zip(placed, kept, strict=True)
        return self.beside_s + sum(self.layer_seconds(index, *layer) for index, layer in enumerate(layers))

    def check(self, layers: int, heads: int) -> None:
        """A ValueError where budgets for so many layers and KV heads are not the model's."""
        expected = len(self.model.layers), self.model.cached_heads
        if (layers, heads) != expected:
            raise ValueError(
                f"budgets of {layers} layers with {heads} KV heads: the model has {expected[0]} with {expected[1]}"
            )

    @property
    def _group(self) -> int:
        return self.model.heads // self.model.cached_heads

    @cached_property
    def _kinds(self) -> list[int]:
        """For every layer, the first one of its kind."""
        first = {self.model.layers[index]: index for index, _ in self.model.layer_kinds}
        return [first[kind] for kind in self.model.layers]

    @cached_property
    def _attention(self) -> LayerCosts:
        # One call takes the heads of all sequences.
        call, batch = self._call, self.batch
        jitter = call.jitter if self.tp_size > 1 else 0.0
        return LayerCosts(batch * call.head_s, batch * call.token_s, call.call_s, jitter)

    def _layer_costs(self, layer: int) -> LayerCosts:
        attention, dense, late = self._attention, self._dense, 1 + self._lag
        sums, of_head = dense.sums(layer, self.batch), dense.of_head(self.batch)
        # The last rank is late where products wait for memory; of attention, `jitter` says how late.
        alike = dense.layer(layer, self.batch) - sums - of_head * self.model.kv_heads / self.tp_size
        return LayerCosts(
            head_s=late * of_head + attention.head_s,
            token_s=attention.token_s,
            alike_s=late * alike + attention.alike_s + sums,
            jitter=attention.jitter,
            least_s=self.profile.launch_s,
        )
