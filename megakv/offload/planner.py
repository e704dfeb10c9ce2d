"""The planner: a split of each group's tokens by the method that the JSON names, or by the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from megakv.injection.recomputation import Recomputation
from megakv.offload.auto import Auto
from megakv.offload.cache import References
from megakv.offload.config import OffloadConfig
from megakv.offload.host_rank import HostRank
from megakv.offload.method import AUTO, METHODS, PLAIN, Plan, Split, methods_of
from megakv.offload.pipeline import layer_times, step_seconds
from megakv.offload.prices import RESIDENT, GroupPrices, LayerPrices, WeightTimes, group_prices, placed
from megakv.offload.rates import Rates
from megakv.offload.reach import placed_rows, seen
from megakv.offload.record import StepRecord
from megakv.offload.store import TieredStore
from megakv.offload.weight_stream import WeightStream


class Planner:
    """Plans of one engine's steps.

    Several ranks wait for each other and so use one method at a time: `leads` says whether this one chooses it, and is
    None for a rank alone. A `chunk` of activations has so many tokens. `host_rank` is there where the host may attend,
    `weights` where weights come over the link.

    `wants_inputs` says whether activations of generated tokens may be of use (those of prompts are kept in any case),
    and `ahead` whether the first layers of a step can be brought while the step before ends.
    """

    def __init__(
        self,
        config: OffloadConfig,
        rates: Rates,
        *,
        chunk: int,
        layers: int,
        recomputation: Recomputation,
        host_rank: HostRank | None,
        leads: bool | None = None,
        weights: WeightStream | None = None,
    ):
        self.ahead = self.wants_inputs = True
        self._config, self._rates, self._layers, self._chunk = config, rates, layers, chunk
        self._recomputation, self._host_rank, self._weights = recomputation, host_rank, weights
        # What ranks agreed on for the step that is next or under way, and for the one after it.
        self._agreed: tuple[str | None, str | None] = None, None
        self._step = 0
        self._proposed: str | None = None
        self._leads = leads
        self._auto = Auto(explore=leads is not False)
        self._latest: tuple[object, Plan] | None = None

    def new_run(self) -> None:
        """A generation begins."""
        self.ahead = self.wants_inputs = True
        self._latest = None

    def plan(
        self,
        cached: Sequence[int],
        references: Callable[[], References],
        groups: Sequence[range],
        out_of_window: Sequence[int],
        *,
        stays: bool,
        kept: Sequence[tuple[float, float]],
        beyond: bool = False,
    ) -> Plan:
        """What becomes of the cached tokens of a step's layers, by the first that is asked for: the same for all.

        Of `cached` tokens of each sequence, where `references` have theirs decides, and what their rows take. Other
        layers may hold fewer activations, or have more on disk: they do what they can. The first `out_of_window` tokens
        of each sequence need not be there, in the mean of all layers. `kept` is what compression has kept of each
        group, and how much of it lies on disk, as of `GroupPrices`. Where tokens do not stay with their rank, the host
        attends to none. With `beyond` it is for the next step.
        """
        firsts = tuple(out_of_window)
        lengths = seen(cached, firsts)
        # A rank may have the same tokens in several steps.
        key = (lengths, tuple(groups), stays, tuple(kept), self.ahead, self._step + beyond)
        if self._latest is None or self._latest[0] != key:
            known, attends = references(), self._host_rank is not None and stays
            prices = self._prices(known, lengths, groups, kept)
            placements = placed_rows(known.whole, lengths, firsts)
            found = []
            for group, (held, on_disk) in zip(groups, kept, strict=True):
                span = slice(group.start, group.stop)
                tokens, own = sum(lengths[span]), tuple(placements[span])
                own_prices = group_prices(prices, own, chunk=self._chunk, attends=attends, tokens=tokens)
                found.append(replace(own_prices, kept=held, kept_on_disk=on_disk))
            self._latest = key, self._plan(known.whole, found, self._agreed[beyond], attends)
        return self._latest[1]

    def observe(self, record: StepRecord) -> None:
        """Take in what a step took."""
        self._rates.learn(record, self._layers)
        if record.usual and record.steady and not record.profiled:
            tokens = record.split.tokens + record.kept + record.kept_on_host
            self._auto.observe(record.plan.name, tokens=tokens, measured_s=record.measured_s)

    def keeps_inputs(self, store: TieredStore, tokens: Sequence[int], memory: float) -> bool:
        """Whether a prompt's activations are worth the host memory that they would take from keys and values.

        What has no room there lies on disk, where the host cannot attend to it. Known once an earlier generation has
        shown what everything costs. `store` is the first layer's, empty; `tokens` are those that each sequence may get,
        and `memory` the bytes of a layer's share.
        """
        rates = self._rates
        if self._config.method != AUTO or self._weights is not None or rates.profile is None:
            return True
        if not (rates.input_bytes and rates["recompute_s"] and rates["host_attend_s"]):
            return True
        prices, seconds = rates.prices(store, None, None), []
        for name, input_bytes in (("all", rates.input_bytes), ("cpu_rank", 0)):
            rows = placed(tokens, memory, row_bytes=rates.row_bytes, input_bytes=input_bytes)
            found = self._solved(name, [group_prices(prices, rows, chunk=self._chunk, attends=True)], hosted=False)
            seconds.append(math.inf if found is None else found.seconds)
        return seconds[0] <= seconds[1]

    # Several ranks, after each token: a step takes as long as the slowest rank, on all of them

    def decision(self) -> int:
        """The plan that this rank would have all ranks use, as a number; -1 where it knows of none."""
        return -1 if self._proposed is None else [*METHODS].index(self._proposed)

    def follow(self, decision: int) -> None:
        """Take the plan that the leading rank proposed at the end of a step.

        The next one is under way on some ranks already: it is used in the one after that.
        """
        self._step += 1
        self._agreed = self._agreed[1], None if decision < 0 else [*METHODS][decision]

    def _prices(
        self, known: References, lengths: Sequence[int], groups: Sequence[range], kept: Sequence[tuple[float, float]]
    ) -> LayerPrices:
        """What a layer costs, for one of the groups."""
        if not any(lengths) and not (known.sample.known and any(map(any, kept))):
            return LayerPrices(0.0, 0.0, 0.0)
        host = self._host_rank if self._host_rank is not None and self._host_rank.queries is not None else None
        width, count = known.row_bytes, len(groups)
        prices = self._rates.prices(known.sample, self._recomputation, host, groups=count, row_bytes=width)
        prices = replace(prices, device_s=prices.device_s / len(groups))
        return prices.with_weights(self._weight_times(), len(groups))

    def _plan(self, store: TieredStore, groups: Sequence[GroupPrices], agreed: str | None, hosted: bool) -> Plan:
        tokens = sum(group.tokens for group in groups)
        if not tokens:
            return Plan(PLAIN, tuple(Split(0) for _ in groups), 0.0, 0.0)
        # What compression kept takes its time, too.
        tokens += round(sum(group.kept for group in groups))
        # From step to step little changes: the plan in use is solved anew every time, the others now and then.
        name = self._auto.going_on(tokens)
        plan = None if name is None else self._solved(name, groups, hosted=hosted)
        if plan is None:
            plans = self._plans(groups, hosted=hosted)
            plan = plans[self._auto.choose({each: found.seconds for each, found in plans.items()}, tokens)]
            # Without those of some tokens, those of later ones would be of no use.
            if self._config.method == AUTO and self._auto.settled:
                self.wants_inputs &= any(split.recomputed for split in plan.splits)
        if self._leads is not None:
            self._proposed = plan.name
            if agreed is not None and agreed != plan.name:
                # A rank that has nothing to use it with does what it thinks best.
                plan = self._solved(agreed, groups, hosted=hosted) or plan
        return plan._replace(predicted_s=self._auto.seconds(plan.name, {plan.name: plan.seconds}, tokens))

    def _plans(self, groups: Sequence[GroupPrices], *, hosted: bool) -> dict[str, Plan]:
        """Those that treat tokens otherwise than those before them; streaming where there is nothing else to do."""
        plans: dict[object, Plan] = {}
        for name in methods_of(self._config.method):
            if (found := self._solved(name, groups, hosted=hosted)) is not None:
                ways = [(each.recomputed, each.chunks, each.on_host) for each in found.splits]
                plans.setdefault((*ways, found.kept_on_host), found)
        if not plans and (plain := self._solved(PLAIN, groups, hosted=False)) is not None:
            return {PLAIN: plain}
        return {plan.name: plan for plan in plans.values()}

    def _solved(self, name: str, groups: Sequence[GroupPrices], *, hosted: bool) -> Plan | None:
        """A plan by its method, with which the host may attend, if `hosted`; None where what is cached allows none."""
        ways = [groups]
        if hosted and METHODS[name].attends_on_host and any(group.kept for group in groups):
            if not any(group.kept_on_disk for group in groups):
                ways = [groups, [replace(group, kept_on_host=True) for group in groups]]
        plans = [plan for own in ways if (plan := self._divided(name, own)) is not None]
        return min(plans, key=lambda plan: plan.seconds, default=None)

    def _divided(self, name: str, groups: Sequence[GroupPrices]) -> Plan | None:
        # Groups of one size are split alike.
        known = {group: METHODS[name].split(group) for group in set(groups)}
        if not any(known.values()):
            return None
        # Groups that a method does not fit, as without any cached token, are streamed.
        splits = tuple(known[group] or Split(group.tokens, 0, 0, group.resident, group.chunk) for group in groups)
        outside_s = self._rates["outside_s"]
        times = [layer_times(*each, outside_s=outside_s) for each in zip(groups, splits, strict=True)]
        seconds = step_seconds(times, self._layers, self._weight_times(), ahead=self.ahead)
        return Plan(name, splits, seconds, 0.0, groups[0].kept_on_host)

    def _weight_times(self) -> WeightTimes:
        """Seconds of the link for a layer's weights."""
        if self._weights is None:
            return RESIDENT
        byte_s = self._rates["disk_byte_s" if self._weights.on_disk else "byte_s"]
        return WeightTimes(*(nbytes * byte_s for nbytes in self._weights.layer_bytes))
