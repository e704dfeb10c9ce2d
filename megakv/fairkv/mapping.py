"""The mapper's result in one JSON file: which rank holds which KV heads of each layer, and what that is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megakv.cache.layer import LayerMapping
from megakv.costmodel.records import Record, load_record
from megakv.fairkv.profile import ModelIdentity
from megakv.weights.placement import HeadGroup, HeadMap, HeadShard

Load = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Part = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Objective = Literal["time", "barrier", "equation4", "algorithm2"]

LEAST_GAIN = 1e-6
"""A smaller one is rounding: the same loads in another order."""


class Replica(BaseModel):
    """A KV head on a rank, and the part of the head's kept tokens that this rank attends to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_head: int = Field(ge=0)
    share: Part = 1.0


class Balance(BaseModel):
    """How evenly a mapping loads the ranks, as in `megakv.base.loads`.

    ``loads[layer][rank]`` are kept tokens that the rank attends to, `rank_loads` their sums, which is its memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    barrier_utilisation: Part
    efficiency: Part
    loads: tuple[tuple[Load, ...], ...]
    rank_loads: tuple[Load, ...]
    busy_rates: tuple[Part, ...]


class Regime(BaseModel):
    """How much faster a step is than with contiguous heads, where `batch` sequences keep `kept` tokens a head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: int = Field(ge=1)
    kept: float = Field(ge=0, allow_inf_nan=False)
    gain: Seconds


class StepTime(Regime):
    """Predicted seconds of a decoding step, mapped and with contiguous heads; their ratio is the gain.

    `regimes` are the same mapping with other batches, and with the same budgets scaled to other means.
    """

    hardware: str
    seconds: Seconds
    contiguous_seconds: Seconds
    regimes: tuple[Regime, ...]


class HeadMapping(Record, Balance):
    """A mapping of a model's KV heads, and the settings of `megakv.fairkv.mapper.map_heads` that it was found under.

    ``mapping[layer][rank]`` are the rank's KV heads, ascending. No mapping has a smaller value of the objective than
    `bound`, in seconds of a step where the objective is ``time``, else in tokens. `contiguous` is the balance of heads
    in runs of neighbours, the paper's SHA. ``head_tokens[layer]``, for ``time``, are as many kept tokens as take as
    long as a head's weights: requests are divided with them.
    """

    format: Literal["megakv head mapping"] = "megakv head mapping"
    version: Literal[1] = 1
    model: str
    tp_size: int = Field(ge=1)
    n_kv_heads: int = Field(ge=1)
    copies: int = Field(ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    copied_heads: int | None = Field(default=None, ge=0)
    split: Literal["even", "free"]
    objective: Objective
    memory_cap: float | None = None
    memory_cap_bytes: float | None = None
    mapping: tuple[tuple[tuple[Replica, ...], ...], ...] = Field(min_length=1)
    head_tokens: tuple[Load, ...] | None = None
    bound: Load
    contiguous: Balance | None = None
    time: StepTime | None = None
    identity: ModelIdentity | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for layer, ranks in enumerate(self.mapping):
            where = f"mapping, layer {layer}"
            if len(ranks) != self.tp_size:
                raise ValueError(f"{where}: {len(ranks)} ranks, not {self.tp_size}")
            shares = [0.0] * self.n_kv_heads
            for rank, replicas in enumerate(ranks):
                heads = [replica.kv_head for replica in replicas]
                if not heads or len(set(heads)) != len(heads) or max(heads) >= self.n_kv_heads:
                    raise ValueError(
                        f"{where}, rank {rank}: KV heads {heads}; allowed: some of {self.n_kv_heads}, once"
                    )
                for replica in replicas:
                    shares[replica.kv_head] += replica.share
            wrong = [head for head, share in enumerate(shares) if abs(share - 1) > 1e-6]
            if wrong:
                raise ValueError(f"{where}: the shares of KV head {wrong[0]} sum to {shares[wrong[0]]:g}, not 1")
        if self.head_tokens is not None and len(self.head_tokens) != len(self.mapping):
            raise ValueError(f"head_tokens are of {len(self.head_tokens)} layers, the mapping of {len(self.mapping)}")
        return self

    def fixed(self, layer: int) -> int:
        """Tokens that a head of a layer counts more on every rank that holds it."""
        return 0 if self.head_tokens is None else round(self.head_tokens[layer])

    @property
    def layers(self) -> list[LayerMapping]:
        """The same by KV head."""
        found = []
        for ranks in self.mapping:
            parts: list[dict[int, float]] = [{} for _ in range(self.n_kv_heads)]
            for rank, replicas in enumerate(ranks):
                for replica in replicas:
                    parts[replica.kv_head][rank] = replica.share
            found.append(LayerMapping.of(parts))
        return found

    def head_map(self, n_heads: int) -> HeadMap:
        """The placement of weights: every replica of a KV head has all its query heads; a rank's copied heads come
        last.
        """
        group, layers = n_heads // self.n_kv_heads, []
        for layer, ranks in zip(self.layers, self.mapping, strict=True):
            shards = []
            for replicas in ranks:
                held = sorted((len(layer.ranks[each.kv_head]) > 1, each.kv_head) for each in replicas)
                groups = (HeadGroup(head, tuple(range(head * group, (head + 1) * group))) for _, head in held)
                shards.append(HeadShard(tuple(groups)))
            layers.append(tuple(shards))
        return HeadMap(n_heads, self.n_kv_heads, tuple(layers))


def by_rank(layer: LayerMapping, tp_size: int) -> tuple[tuple[Replica, ...], ...]:
    """A layer's replicas by rank."""
    ranks: list[list[Replica]] = [[] for _ in range(tp_size)]
    for head, (held, shares) in enumerate(zip(layer.ranks, layer.shares, strict=True)):
        for rank, share in zip(held, shares, strict=True):
            ranks[rank].append(Replica(kv_head=head, share=min(share, 1.0)))
    return tuple(map(tuple, ranks))


def load_mapping(path: str | Path, *, setting: str = "mapping") -> HeadMapping:
    """Read and check a mapping; a `ValueError` names the setting, the file and the field."""
    remedy = "make one: megakv fairkv map --profile PROFILE --tp N --copies C --json FILE"
    return load_record(HeadMapping, path, setting=setting, remedy=remedy)
