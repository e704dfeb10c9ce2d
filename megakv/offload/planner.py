"""The planner: costs of a layer and the scheduler's division of its tokens, for the method that the JSON names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megakv.costmodel.offload import LayerCosts
from megakv.costmodel.offload_disk import Lot
from megakv.costmodel.offload_pipeline import RESIDENT, WeightTimes
from megakv.offload.config import OffloadConfig
from megakv.offload.costs import OffloadCosts
from megakv.offload.division import Division, Plan
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.profiler import HostTrial
from megakv.offload.scheduler import divide, split_point
from megakv.offload.store import TieredStore
from megakv.offload.trials import GROWN, PlanTrials
from megakv.offload.weight_stream import WeightStream

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.record import StepRecord

NAMES = ("stream", "kvpr", "chunked", "cpu_rank", "all")
"""Plans, the plainest first; the last one recomputes while the host attends."""
RECOMPUTING = ("kvpr", "chunked", "all")
HOPELESS = 1.5
"""A plan that takes so many times as long as the best will not be used in the same generation."""


class _Size(NamedTuple):
    """Cached tokens of a group of sequences.

    Of them, those with activations, those that the host may attend to, and those that stay on the accelerator; and
    where those of each sequence lie, if some do on disk.
    """

    tokens: int
    most: int
    host: int
    resident: int
    lots: tuple[Lot, ...] = ()

    def grown(self, each: int, sequences: int) -> _Size:
        """With so many more tokens of each of so many sequences: on disk, where some are."""
        lots = tuple(lot._replace(tokens=lot.tokens + each, inputs=lot.inputs + each) for lot in self.lots)
        more = each * (len(lots) or sequences)
        host = self.host + more if self.host and not lots else self.host
        return _Size(self.tokens + more, self.most + more, host, self.resident, lots)


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
    leads : bool, optional
        Of several ranks, which wait for each other and so try one plan at a time, whether this one chooses it; None
        for a rank alone.
    weights : WeightStream, optional
        Where weights come over the link too.

    Attributes
    ----------
    recomputation : Recomputation or None
        What recomputation is measured with.
    queries : Queries or None
        What the host's attention is measured with; known after the first pass.
    wants_inputs : bool
        Whether activations of generated tokens may be of use; those of prompts are kept in any case.
    ahead : bool
        Whether the first layers of a step can be brought while the step before ends.
    """

    def __init__(
        self,
        config: OffloadConfig,
        costs: OffloadCosts,
        *,
        layers: int,
        host_rank: HostRank | None,
        leads: bool | None = None,
        weights: WeightStream | None = None,
    ):
        self.recomputation: Recomputation | None = None
        self.queries: Queries | None = None
        self.ahead = self.wants_inputs = True
        self._new_tokens = 0
        self._undecided = True
        self._config = config
        self._costs = costs
        self._layers = layers
        self._host_rank = host_rank
        # What ranks agreed on for the step that is next or under way, and for the one after it.
        self._words: tuple[str | None, str | None] = None, None
        self._step = 0
        self._proposed: str | None = None
        self._leads = leads
        self._trials = PlanTrials(explore=leads is not False)
        self._weights = weights
        self._latest: tuple[object, Plan] | None = None
        # Plans of this generation that are not worth solving anew at every comparison, by name, and their tokens.
        self._hopeless: dict[str, tuple[int, Plan]] = {}

    def new_run(self, new_tokens: int) -> None:
        """A generation begins that may add so many tokens to each sequence; 0 if that is not known."""
        self._new_tokens = new_tokens
        self.ahead = self.wants_inputs = self._undecided = True
        self._hopeless.clear()

    def plan(
        self,
        store: TieredStore,
        groups: Sequence[range],
        unseen: Sequence[int],
        *,
        stays: bool,
        beyond: bool = False,
    ) -> Plan:
        """What becomes of the cached tokens of a step's layers, by the first that is asked for: the same for all.

        The first `unseen` tokens of each sequence need not be there, in the mean of all layers. Where tokens do not
        stay with their rank, the host attends to none. With `beyond` it is for the next step.
        """

        def seen(counts: Sequence[int]) -> list[int]:
            return [max(0, count - first) for count, first in zip(counts, unseen, strict=True)]

        lengths = seen(store.settled())
        # Some layers have this step's tokens already: those that count are the same in all.
        resident, inputs = ([*map(min, lengths, each)] for each in (store.residents(), seen(store.with_inputs())))
        # A rank may have the same tokens in several steps.
        key = (lengths, resident, inputs, tuple(groups), stays, self.ahead, self._step + beyond)
        if self._latest is None or self._latest[0] != key:
            attends = self._host_rank is not None and stays
            memory, held = seen(store.in_memory()), seen(store.in_memory(inputs=True))
            sizes = []
            for group in groups:
                lots = tuple(
                    Lot(
                        lengths[row] - resident[row],
                        inputs[row],
                        min(lengths[row], memory[row]),
                        min(inputs[row], held[row]),
                    )
                    for row in group
                )
                sizes.append(
                    _Size(
                        sum(lengths[row] for row in group),
                        sum(lot.inputs for lot in lots),
                        sum(lot.rows_in_memory for lot in lots) if attends else 0,
                        sum(resident[row] for row in group),
                        lots if any(lot.on_disk for lot in lots) else (),
                    )
                )
            self._latest = key, self._plan(store, sizes, self._words[beyond])
        return self._latest[1]

    def observe(self, record: StepRecord) -> None:
        """Take in what a step took."""
        if not (self._costs.settled and record.usual):
            return
        plan = record.plan
        self._trials.observe(
            plan.name,
            tokens=record.division.tokens,
            predicted_s=plan.seconds,
            measured_s=record.measured_s,
            steady=record.steady,
        )

    # Several ranks, after each token: a step takes as long as the slowest rank, on all of them

    def proposal(self) -> int:
        """The plan that this rank would have all ranks use, as a number; -1 where it knows of none."""
        return -1 if self._proposed is None else NAMES.index(self._proposed)

    def heed(self, proposal: int) -> None:
        """Take the plan that the leading rank proposed at the end of a step.

        The next one is under way on some ranks already: it is used in the one after that.
        """
        self._step += 1
        self._words = self._words[1], None if proposal < 0 else NAMES[proposal]

    def _plan(self, store: TieredStore, sizes: Sequence[_Size], agreed: str | None) -> Plan:
        tokens = sum(size.tokens for size in sizes)
        if not tokens:
            return Plan("stream", tuple(Division(0) for _ in sizes), 1, 0.0, 0.0)
        costs, weights = self._layer(store, len(sizes)), self._weight_times()
        settled = self._costs.settled
        # From step to step little changes: the plan in use is solved anew every time, the others now and then.
        going_on = self._trials.going_on(tokens) if settled else None
        plan = None if going_on is None else self._solved(going_on, costs, sizes, weights)
        if plan is None or self._undecided:
            plans = self._plans(costs, sizes, weights, tokens)
            predicted = {name: each.seconds for name, each in plans.items()}
            # Trials of the first steps, which also fill caches and pipelines, would say nothing.
            if plan is None:
                best = min(predicted, key=lambda name: predicted[name])
                chosen = self._trials.choose(predicted, tokens) if settled else best
                known = chosen not in self._hopeless
                plan = plans[chosen] if known else self._solved(chosen, costs, sizes, weights) or plans[chosen]
            self._undecided = not settled
            if settled:
                times = {name: seconds * self._trials.correction(name, tokens) for name, seconds in predicted.items()}
                self._set_aside(plans, times, tokens)
                # Without those of some tokens, those of later ones would be of no use.
                if self._config.method == "auto" and self.wants_inputs:
                    self.wants_inputs = self._may_recompute_more(costs, sizes, times, len(store.lengths()))
        if self._leads is not None:
            self._proposed = plan.name if settled else None
            if agreed is not None and agreed != plan.name:
                # A rank that has nothing to use it with does what it thinks best.
                plan = self._solved(agreed, costs, sizes, weights) or plan
        return plan._replace(predicted_s=plan.seconds * self._trials.correction(plan.name, tokens))

    def _plans(self, costs: LayerCosts, sizes: Sequence[_Size], weights: WeightTimes, tokens: int) -> dict[str, Plan]:
        """All plans that treat tokens otherwise than those before them."""
        plans: dict[str, Plan] = {}
        for name in NAMES:
            then, found = self._hopeless.get(name, (0, None))
            if found is None or GROWN * (tokens - then) > then:
                found = self._solved(name, costs, sizes, weights)
                self._hopeless.pop(name, None)
            if found is not None and all(map(found.differs, plans.values())):
                plans[name] = found
        return plans

    def _set_aside(self, plans: Mapping[str, Plan], times: Mapping[str, float], tokens: int) -> None:
        """Remember the plans that will not be used soon."""
        slow = HOPELESS * min(times.values())
        found = {name: self._hopeless.get(name, (tokens, plan)) for name, plan in plans.items()}
        self._hopeless = {name: each for name, each in found.items() if times[name] > slow}

    def _solved(self, name: str, costs: LayerCosts, sizes: Sequence[_Size], weights: WeightTimes) -> Plan | None:
        """A plan by its name; None where the method, or what is cached, allows none."""
        costs = self._costs.of_plan(name, costs)
        costs = replace(costs, device_s=costs.device_s / len(sizes))
        # Groups of one size are divided alike.
        known: dict[_Size, tuple[Division, int] | None] = {
            size: self._divided(name, costs, size) for size in set(sizes)
        }
        found = [known[size] for size in sizes]
        if not any(found):
            return None
        # A group may have fewer choices than others: without any cached token, only the plainest.
        chosen = [each or (Division(size.tokens), 1) for each, size in zip(found, sizes, strict=True)]
        divisions, chunk = tuple(each[0] for each in chosen), max(each[1] for each in chosen)
        lots = [size.lots for size in sizes]
        seconds = self._costs.predict(costs, divisions, self._layers, weights, chunk=chunk, ahead=self.ahead, lots=lots)
        return Plan(name, divisions, chunk, seconds, 0.0)

    def _may_recompute_more(
        self, costs: LayerCosts, sizes: Sequence[_Size], times: Mapping[str, float], batch: int
    ) -> bool:
        """Whether a likely plan would recompute more tokens, when this generation ends, than have activations now."""
        if not self._new_tokens:
            return True
        best = min(times.values())
        for name in RECOMPUTING:
            if times.get(name, best) > HOPELESS * best:
                continue
            own = self._costs.of_plan(name, costs)
            own = replace(own, device_s=own.device_s / len(sizes))
            for size in set(sizes):
                found = self._divided(name, own, size.grown(self._new_tokens, -(-batch // len(sizes))))
                if found is not None and found[0].recomputed > size.most:
                    return True
        return False

    def _divided(self, name: str, costs: LayerCosts, size: _Size) -> tuple[Division, int] | None:
        """A group's division by a plan, and tokens of a chunk of activations; None where there is no such plan."""
        (tokens, most, host, resident, lots), chunk = size, self._config.chunk_tokens
        auto = self._config.method == "auto"
        if not (auto or name == self._config.method or (name == "stream" and not (most or host))):
            return None
        if name == "stream":
            return Division(tokens, resident=resident), chunk
        if name == "kvpr" and most:
            found = split_point(costs, tokens - resident, most=most, lots=lots)
            return replace(found, tokens=tokens, resident=resident), tokens
        if name == "chunked" and most:
            return divide(costs, tokens, chunk=chunk, resident=resident, most=most, lots=lots), chunk
        if name == "cpu_rank" and host:
            return divide(costs, tokens, chunk=chunk, resident=resident, recompute=False, host=host, lots=lots), chunk
        if name == "all" and auto and most and host:
            return divide(costs, tokens, chunk=chunk, resident=resident, most=most, host=host, lots=lots), chunk
        return None

    def _weight_times(self) -> WeightTimes:
        """Seconds of the link for a layer's weights."""
        if self._weights is None:
            return RESIDENT
        keys, others = self._weights.layer_bytes
        return WeightTimes(self._costs.sending_s(keys), self._costs.sending_s(others))

    def _layer(self, store: TieredStore, groups: int) -> LayerCosts:
        trial = None
        if self._host_rank is not None and self.queries is not None and any(store.in_memory()):
            trial = HostTrial(self._host_rank, self.queries)
        costs = self._costs.layer(store, self.recomputation, trial, groups=groups)
        weights = self._weight_times()
        if groups == 1:
            return costs.with_offloaded_weights(kv_weights_s=weights.keys_s, other_weights_s=weights.others_s)
        return costs.in_column(weights_s=weights.keys_s + weights.others_s, num_gpu_batches=groups)
