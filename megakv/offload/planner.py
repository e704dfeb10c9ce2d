"""The planner: a split of each group's tokens by the method that the JSON names, or by the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megakv.injection.recomputation import Recomputation
from megakv.offload.auto import Auto
from megakv.offload.cache import References
from megakv.offload.config import OffloadConfig
from megakv.offload.costs import OffloadCosts
from megakv.offload.equations import (
    RESIDENT,
    GroupCosts,
    LayerCosts,
    WeightTimes,
    disk_seconds,
    placed,
)
from megakv.offload.host_rank import HostRank
from megakv.offload.method import Plan, Split
from megakv.offload.methods import AUTO, METHODS, methods_of
from megakv.offload.reach import Reach, seen
from megakv.offload.record import StepRecord
from megakv.offload.store import TieredStore
from megakv.offload.weight_stream import WeightStream

PLAIN = "stream"
UNLIKELY = 1.5
"""A plan that takes so many times as long as the best will not be used in the same generation."""


class Planner:
    """Plans of one engine's steps.

    Several ranks wait for each other and so try one plan at a time: `leads` says whether this one chooses it, and is
    None for a rank alone. A `chunk` of activations has so many tokens. `host_rank` is there where the host may attend,
    `weights` where weights come over the link.

    `wants_inputs` says whether activations of generated tokens may be of use (those of prompts are kept in any case),
    and `ahead` whether the first layers of a step can be brought while the step before ends.
    """

    def __init__(
        self,
        config: OffloadConfig,
        costs: OffloadCosts,
        *,
        chunk: int,
        layers: int,
        recomputation: Recomputation,
        host_rank: HostRank | None,
        leads: bool | None = None,
        weights: WeightStream | None = None,
    ):
        self.ahead = self.wants_inputs = True
        self._config, self._costs, self._layers, self._chunk = config, costs, layers, chunk
        self._recomputation, self._host_rank, self._weights = recomputation, host_rank, weights
        self._new_tokens = 0
        self._undecided = True
        # What ranks agreed on for the step that is next or under way, and for the one after it.
        self._agreed: tuple[str | None, str | None] = None, None
        self._step = 0
        self._proposed: str | None = None
        self._leads = leads
        self._auto = Auto(explore=leads is not False)
        self._latest: tuple[object, Plan] | None = None
        # Whether the host may attend to what compression kept.
        self._in_reach = False

    def new_run(self, new_tokens: int) -> None:
        """A generation begins that may add so many tokens to each sequence; 0 if that is not known."""
        self._new_tokens = new_tokens
        self.ahead = self.wants_inputs = self._undecided = True
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
        group, and how much of it lies on disk, as of `GroupCosts`. Where tokens do not stay with their rank, the host
        attends to none. With `beyond` it is for the next step.
        """

        firsts = tuple(out_of_window)
        lengths = seen(cached, firsts)
        # A rank may have the same tokens in several steps.
        key = (lengths, tuple(groups), stays, tuple(kept), self.ahead, self._step + beyond)
        if self._latest is None or self._latest[0] != key:
            known = references()
            found = self._groups(known, Reach.of(known.whole, lengths, firsts), groups, stays, kept)
            self._latest = key, self._plan(known.whole, found, self._agreed[beyond])
        return self._latest[1]

    def observe(self, record: StepRecord) -> None:
        """Take in what a step took."""
        if self._costs.warmed_up and record.usual:
            plan, tokens = record.plan, record.split.tokens + record.kept + record.kept_on_host
            times = {"predicted_s": plan.seconds, "measured_s": record.measured_s}
            self._auto.observe(plan.name, tokens=tokens, steady=record.steady, **times)

    def keeps_inputs(self, store: TieredStore, tokens: Sequence[int], memory: float) -> bool:
        """Whether a prompt's activations are worth the host memory that they would take from keys and values.

        What has no room there lies on disk, where the host cannot attend to it. Known once an earlier generation has
        shown what everything costs. `store` is the first layer's, empty; `tokens` are those that each sequence may get,
        and `memory` the bytes of a layer's share.
        """
        profile = self._costs.profile
        if self._config.method != AUTO or self._weights is not None or profile is None or not self._costs.warmed_up:
            return True
        each = profile.row_bytes + profile.input_bytes
        if not (profile.input_bytes and profile.recompute_s and profile.host_attend_s) or memory >= sum(tokens) * each:
            return True
        costs, seconds = self._costs.layer(store, None, None), []
        for name, input_bytes in (("all", profile.input_bytes), ("cpu_rank", 0)):
            placements = placed(tokens, memory, row_bytes=profile.row_bytes, input_bytes=input_bytes)
            inputs, host = (
                sum(placement.inputs for placement in placements),
                sum(placement.rows_in_memory for placement in placements),
            )
            group = GroupCosts(costs, sum(tokens), inputs, host, 0, self._chunk, placements)
            found = self._solved(name, [group])
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

    def _plan(self, store: TieredStore, groups: Sequence[GroupCosts], agreed: str | None) -> Plan:
        tokens = sum(group.tokens for group in groups)
        if not tokens:
            return Plan(PLAIN, tuple(Split(0) for _ in groups), 0.0, 0.0)
        # What compression kept takes its time, too.
        tokens += round(sum(group.kept for group in groups))
        warmed_up = self._costs.warmed_up
        # From step to step little changes: the plan in use is solved anew every time, the others now and then.
        name = self._auto.going_on(tokens) if warmed_up else None
        plan = None if name is None else self._solved(name, groups)
        if plan is None or self._undecided:
            plans = self._plans(groups)
            predicted = {each: found.seconds for each, found in plans.items()}
            if plan is None:
                # Trials of the first steps, which also fill caches and pipelines, would say nothing.
                name = self._auto.choose(predicted, tokens) if warmed_up else min(predicted, key=predicted.__getitem__)
                plan = plans[name]
            self._undecided = not warmed_up
            # Without those of some tokens, those of later ones would be of no use.
            if warmed_up and self._config.method == AUTO and self.wants_inputs:
                times = {each: seconds * self._auto.correction(each, tokens) for each, seconds in predicted.items()}
                self.wants_inputs = self._may_recompute_more(plans, times, groups, len(store.lengths()))
        if self._leads is not None:
            self._proposed = plan.name if warmed_up else None
            if agreed is not None and agreed != plan.name:
                # A rank that has nothing to use it with does what it thinks best.
                plan = self._solved(agreed, groups) or plan
        return plan._replace(predicted_s=plan.seconds * self._auto.correction(plan.name, tokens))

    def _groups(
        self,
        known: References,
        reach: Reach,
        groups: Sequence[range],
        stays: bool,
        kept: Sequence[tuple[float, float]],
    ) -> list[GroupCosts]:
        """What a layer costs for each group."""
        attends = self._in_reach = self._host_rank is not None and stays
        costs = LayerCosts(0.0, 0.0, 0.0)
        if any(reach.lengths) or (known.sample.known and any(map(any, kept))):
            host = self._host_rank if self._host_rank is not None and self._host_rank.queries is not None else None
            store, width = known.sample, known.row_bytes
            costs = self._costs.layer(store, self._recomputation, host, groups=len(groups), row_bytes=width)
            costs = costs.with_weights(self._weight_times(), len(groups))
        placements = reach.placements(known.whole)
        return [
            GroupCosts(
                costs,
                sum(reach.lengths[group.start : group.stop]),
                sum(placement.inputs for placement in own),
                sum(placement.rows_in_memory for placement in own) if attends else 0,
                sum(reach.resident[group.start : group.stop]),
                self._chunk,
                own if any(placement.on_disk for placement in own) else (),
                *both,
            )
            for group, both in zip(groups, kept, strict=True)
            for own in (tuple(placements[group.start : group.stop]),)
        ]

    def _plans(self, groups: Sequence[GroupCosts]) -> dict[str, Plan]:
        """Those that treat tokens otherwise than those before them; streaming where there is nothing else to do."""
        plans: dict[str, Plan] = {}
        for name in methods_of(self._config.method):
            found = self._solved(name, groups)
            if found is not None and all(map(found.differs, plans.values())):
                plans[name] = found
        plain = None if plans else self._solved(PLAIN, groups)
        return plans if plain is None else {PLAIN: plain}

    def _solved(self, name: str, groups: Sequence[GroupCosts]) -> Plan | None:
        """A plan by its method; None where what is cached allows none."""
        costs = self._costs.of_plan(name, len(groups), groups[0].layer)
        costs = replace(costs, device_s=costs.device_s / len(groups))
        ways = [[replace(group, layer=costs) for group in groups]]
        kept, on_disk = (sum(getattr(group, each) for group in groups) for each in ("kept", "kept_on_disk"))
        if kept and not on_disk and self._in_reach and METHODS[name].attends_on_host:
            ways.append([replace(group, kept_on_host=True) for group in ways[0]])
        plans = [plan for own in ways if (plan := self._divided(name, own)) is not None]
        return min(plans, key=lambda plan: plan.seconds, default=None)

    def _divided(self, name: str, own: Sequence[GroupCosts]) -> Plan | None:
        # Groups of one size are split alike.
        known = {group: METHODS[name].split(group) for group in set(own)}
        if not any(known.values()):
            return None
        # Groups that a method does not fit, as without any cached token, are streamed.
        splits = tuple(known[group] or Split(group.tokens, 0, 0, group.resident, group.chunk) for group in own)
        seconds = self._costs.predict(own, splits, self._layers, self._weight_times(), ahead=self.ahead)
        return Plan(name, splits, seconds, 0.0, own[0].kept_on_host)

    def _may_recompute_more(
        self, plans: Mapping[str, Plan], times: Mapping[str, float], groups: Sequence[GroupCosts], batch: int
    ) -> bool:
        """Whether a likely plan may recompute more tokens, when this generation ends, than have activations now.

        With more tokens it recomputes as many more.
        """
        tokens = sum(group.tokens for group in groups)
        growth = 1 + self._new_tokens * batch / tokens
        return not self._new_tokens or any(
            growth * split.recomputed > group.inputs
            for name, plan in plans.items()
            if times[name] <= UNLIKELY * min(times.values())
            for split, group in zip(plan.splits, groups, strict=True)
            if split.recomputed
        )

    def _weight_times(self) -> WeightTimes:
        """Seconds of the link for a layer's weights."""
        if self._weights is None:
            return RESIDENT
        link, disk = self._costs.link_bytes_s, self._costs.disk_bytes_s if self._weights.on_disk else 0.0
        return WeightTimes(*(disk_seconds(nbytes, link, disk) for nbytes in self._weights.layer_bytes))
