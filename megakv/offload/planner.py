"""The planner: costs of a layer and the scheduler's division of its tokens, for the method that the JSON names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megakv.costmodel.offload import LayerCosts
from megakv.errors import MegaKVError
from megakv.offload.config import OffloadConfig
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.pool import PagePool
from megakv.offload.profiler import HostTrial, OffloadCosts
from megakv.offload.scheduler import Division, Plan, divide, split_point
from megakv.offload.store import TieredStore
from megakv.offload.tiers import in_units
from megakv.offload.trials import PlanTrials

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.record import StepRecord


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
    explore : bool
        Whether `auto` may try its plans in turns.

    Attributes
    ----------
    recomputation : Recomputation or None
        What recomputation is measured with.
    queries : Queries or None
        What the host's attention is measured with; known after the first pass.
    """

    def __init__(
        self,
        config: OffloadConfig,
        costs: OffloadCosts,
        *,
        layers: int,
        host_rank: HostRank | None,
        explore: bool,
    ):
        self.recomputation: Recomputation | None = None
        self.queries: Queries | None = None
        self._config = config
        self._costs = costs
        self._layers = layers
        self._host_rank = host_rank
        self._trials = PlanTrials(explore=explore)
        self._latest: tuple[tuple[int, ...], Plan] | None = None

    def plan(self, store: TieredStore) -> Plan:
        """What becomes of the cached tokens of a step's layers, by one of them: the same for all."""
        lengths = store.lengths()
        tokens, most = sum(lengths), sum(store.with_inputs())
        host = 0 if self._host_rank is None else sum(store.in_memory())
        key = (*lengths, most, host)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._plan(store, tokens, most, host)
        return self._latest[1]

    def observe(self, record: StepRecord) -> None:
        """Take in what a step took."""
        if not (self._costs.settled and record.usual):
            return
        plan = record.plan
        self._trials.observe(plan.name, tokens=record.cached, predicted_s=plan.seconds, measured_s=record.measured_s)

    def _plan(self, store: TieredStore, tokens: int, most: int, host: int) -> Plan:
        if not tokens:
            return Plan("stream", Division(0), 1, 0.0, 0.0)
        costs = self._layer(store)
        plans: dict[str, Plan] = {}
        for name, division, chunk in self._candidates(costs, tokens, most, host):
            same = any((division.recomputed, division.on_host) == (other.division.recomputed, other.division.on_host)
                       and -(-division.recomputed // chunk) == -(-other.division.recomputed // other.chunk)
                       for other in plans.values())  # fmt: skip
            if not same:
                seconds = self._costs.predict(costs, division, self._layers, chunk=chunk)
                plans[name] = Plan(name, division, chunk, seconds, seconds)
        predicted = {name: plan.seconds for name, plan in plans.items()}
        # Trials of the first steps, which also fill caches and pipelines, would say nothing.
        best = min(predicted, key=lambda name: predicted[name])
        name = self._trials.choose(predicted, tokens) if self._costs.settled else best
        return plans[name]._replace(predicted_s=plans[name].seconds * self._trials.correction(name, tokens))

    def _candidates(self, costs: LayerCosts, tokens: int, most: int, host: int) -> Iterator[tuple[str, Division, int]]:
        """Plans that the method allows: name, division, and tokens of a chunk of activations. The plainest first."""
        method, chunk = self._config.method, self._config.chunk_tokens
        if method in ("auto", "stream") or not (most or host):
            yield "stream", Division(tokens), chunk
        if method in ("auto", "kvpr") and most:
            yield "kvpr", split_point(costs, tokens, most=most), tokens
        if method in ("auto", "chunked") and most:
            yield "chunked", divide(costs, tokens, chunk=chunk, most=most), chunk
        if method in ("auto", "cpu_rank") and host:
            yield "cpu_rank", divide(costs, tokens, chunk=chunk, recompute=False, host=host), chunk
        if method == "auto" and most and host:
            yield "all", divide(costs, tokens, chunk=chunk, most=most, host=host), chunk

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
