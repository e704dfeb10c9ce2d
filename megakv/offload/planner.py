"""The planner: costs of a layer and the scheduler's division of its tokens, for the method that the JSON names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megakv.costmodel.offload import LayerCosts
from megakv.errors import MegaKVError
from megakv.offload.config import OffloadConfig
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.pool import PagePool
from megakv.offload.profiler import HostTrial, OffloadCosts
from megakv.offload.scheduler import Division, divide, split_point
from megakv.offload.store import TieredStore
from megakv.offload.tiers import in_units

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation


class Planner:
    """Divisions of one engine's layers.

    Parameters
    ----------
    config : OffloadConfig
    costs : OffloadCosts
    layers : int
        Attention layers.
    host_rank : HostRank, optional
        Where the host may attend.

    Attributes
    ----------
    recomputation : Recomputation or None
        What recomputation is measured with.
    queries : Queries or None
        What the host's attention is measured with; known after the first pass.
    """

    def __init__(self, config: OffloadConfig, costs: OffloadCosts, *, layers: int, host_rank: HostRank | None):
        self.recomputation: Recomputation | None = None
        self.queries: Queries | None = None
        self._config = config
        self._costs = costs
        self._layers = layers
        self._host_rank = host_rank
        self._latest: tuple[tuple[int, ...], Division] | None = None

    def divide(self, store: TieredStore) -> Division:
        """What becomes of the cached tokens of a step's layers, by one of them: the same for all."""
        lengths = store.lengths()
        tokens, most = sum(lengths), sum(store.with_inputs())
        host = 0 if self._host_rank is None else sum(store.in_memory())
        key = (*lengths, most, host)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._divide(store, tokens, most, host)
        return self._latest[1]

    def _divide(self, store: TieredStore, tokens: int, most: int, host: int) -> Division:
        if not most and not host:
            return Division(tokens)
        costs = self._layer(store)
        if self._config.method == "kvpr":
            return split_point(costs, tokens, most=most)
        return divide(costs, tokens, chunk=self.chunk(tokens), most=most, host=host)

    def chunk(self, tokens: int) -> int:
        """Tokens of a chunk of activations; the paper's form sends them whole."""
        return max(1, tokens if self._config.method == "kvpr" else self._config.chunk_tokens)

    def predict(self, store: TieredStore, division: Division) -> float:
        """Seconds from step to step."""
        return self._costs.predict(self._layer(store), division, self._layers)

    def check_room(self, store: TieredStore, pool: PagePool, new_tokens: int, *, later_turn: bool) -> None:
        """Refuse in its first layer what would outgrow the budgets in a later one, or while tokens are generated.

        Parameters
        ----------
        store : TieredStore
            Of the first layer, the prompt in it.
        pool : PagePool
        new_tokens : int
            How many each sequence may still get on this rank.
        later_turn : bool
            Whether the other layers hold earlier turns already.

        Raises
        ------
        MegaKVError
            With what is needed and what there is.
        """
        lengths = store.lengths()
        needed = self._layers * store.bytes_for([count + new_tokens for count in lengths])
        held = store.nbytes() * (self._layers if later_turn else 1)
        if not pool.has_room(needed - held):
            raise MegaKVError(
                f"this generation needs {in_units(needed)} for offloaded keys and values on this rank "
                f"({sum(lengths)} tokens so far, up to {new_tokens} more for each of {len(lengths)} sequences), but "
                f"{pool.budgets()}, of which {in_units(pool.free_bytes() + held)} can be used; raise a budget or ask "
                "for fewer tokens"
            )

    def _layer(self, store: TieredStore) -> LayerCosts:
        trial = None
        if self._host_rank is not None and self.queries is not None and any(store.in_memory()):
            trial = HostTrial(self._host_rank, self.queries)
        return self._costs.layer(store, self.recomputation, trial)
