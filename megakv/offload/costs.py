"""What a layer of an engine's model costs here: from a profile, and from what steps show."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megakv.costmodel.offload import (
    LayerCosts,
    link_rate,
    other_work_seconds,
    sending_seconds,
    shared_attend_seconds,
    shown_parts,
)
from megakv.costmodel.offload_disk import Lot, disk_seconds, mean_costs, shown_rates
from megakv.costmodel.offload_pipeline import WeightTimes, group_times, step_seconds
from megakv.offload.division import Division
from megakv.offload.profile import OffloadProfile
from megakv.offload.profiler import HostTrial, Profiler
from megakv.offload.record import StepRecord

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.store import TieredStore

SHOWN = 15
"""Latest steps whose median is believed."""
STEADY = 3
"""Steps after which that is so: the first ones fill caches and pipelines, so that only the latest of them counts."""
FEW, SOME, MANY = 1 / 8, 1 / 4, 1 / 2
"""Parts of the cached tokens. What concerns less than that of them shows its overhead rather than its speed: calls that
compute with many weights show their speed early, transfers later, and attention last."""


SHOWN_COSTS = (
    *("kv_s", "activation_s", "disk_kv_s", "disk_activation_s"),
    *("recompute_s", "launch_s", "host_attend_s", "host_fixed_s"),
)
"""What is believed of each plan by itself, beside the accelerator's other work."""


class _Shown:
    """What the latest steps showed, quantity by quantity: medians, as single steps may have been disturbed."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SHOWN))

    def add(self, name: str, value: float, *, alone: bool = False) -> None:
        """Take in what a step showed; `alone` forgets what earlier ones did."""
        samples = self._samples[name]
        if alone:
            samples.clear()
        samples.append(value)

    def get(self, name: str, default: float = 0.0) -> float:
        """The median of a quantity."""
        samples = self._samples.get(name)
        return statistics.median(samples) if samples else default

    def all(self) -> dict[str, float]:
        """Those of all quantities."""
        return {name: statistics.median(samples) for name, samples in self._samples.items()}


class OffloadCosts:
    """Costs of a layer of an engine's model.

    What a layer computes beside recomputing differs by plan: transfers and the host's attention slow it in their own
    ways. So that is learned for every plan by itself.

    Parameters
    ----------
    profiler : Profiler
    sharers : int
        Ranks on this host: they share the bandwidth of its memory when they attend there.
    """

    def __init__(self, profiler: Profiler, *, sharers: int = 1):
        self._profiler = profiler
        self._sharers = sharers
        self.profile: OffloadProfile | None = None
        self._measured: OffloadProfile | None = None
        self._shown = _Shown()
        self._plans: dict[str, _Shown] = {}
        self._steps = 0

    def layer(
        self, store: TieredStore, recomputation: Recomputation | None, host: HostTrial | None, *, groups: int = 1
    ) -> LayerCosts:
        """Costs of a layer that holds cached tokens, but for `device_s`; the first call measures, or reads the profile.

        Of one of `groups` groups of sequences.

        Raises
        ------
        ValueError
            If the profile is of another machine or model.
        """
        known = self.profile
        if known is None or (host is not None and not known.host_attend_s) or store.input_bytes > known.input_bytes:
            self._measured = self.profile = known = self._profiler.profile(store, recomputation, host, known)
        return replace(self._layer(known, len(store.lengths()) / groups), transfer_s=known.transfer_s)

    def check(self, store: TieredStore) -> None:
        """Refuse a profile of other rows than a store's, before a prompt is computed; raises as `layer`."""
        if self.profile is None:
            self._profiler.load(store)

    def _layer(self, profile: OffloadProfile, sequences: float) -> LayerCosts:
        """What each token costs by a profile, and the host's part whatever its tokens."""
        return LayerCosts(
            kv_s=sending_seconds(profile.row_bytes, profile.link_bytes_s),
            activation_s=sending_seconds(profile.input_bytes, profile.link_bytes_s),
            recompute_s=profile.recompute_s,
            launch_s=profile.launch_s,
            host_attend_s=shared_attend_seconds(profile.host_attend_s, self._sharers),
            host_fixed_s=profile.host_call_s + profile.host_fixed_s * sequences,
            attend_s=self._shown.get("attend_s"),
            disk_kv_s=disk_seconds(profile.row_bytes, profile.link_bytes_s, profile.disk_read_bytes_s),
            disk_activation_s=disk_seconds(profile.input_bytes, profile.link_bytes_s, profile.disk_read_bytes_s),
        )

    def of_plan(self, plan: str, costs: LayerCosts) -> LayerCosts:
        """Costs as the latest steps of a plan showed them; without any, with the other work of the least hampered plan.

        What other plans show since then is not its own: times of plans are compared as they were measured.
        """
        known = self._plans.get(plan)
        if known is None:
            shown = [each.get("device_s") for each in self._plans.values()]
            return replace(costs, device_s=min(shown, default=self._shown.get("device_s")))
        return replace(costs, **known.all())

    def predict(
        self,
        costs: LayerCosts,
        divisions: Sequence[Division],
        layers: int,
        weights: WeightTimes,
        *,
        chunk: int,
        ahead: bool,
        lots: Sequence[Sequence[Lot]] = (),
    ) -> float:
        """Seconds from step to step, of a division for each group.

        Parameters
        ----------
        costs : LayerCosts
            Of one group.
        divisions : sequence of Division
        layers : int
        weights : WeightTimes
        chunk : int
            In tokens.
        ahead : bool
            As for `step_seconds`.
        lots : sequence of sequence of Lot
            Of each group with rows on disk, where they lie.
        """
        groups = [
            group_times(
                mean_costs(costs, group, each.recomputed, each.on_host) if group else costs,
                each.recomputed,
                each.on_host,
                each.streamed,
                chunk=chunk,
                outside_s=self._shown.get("outside_s"),
                resident=each.resident,
            )
            for each, group in zip(divisions, lots or [()] * len(divisions), strict=True)
        ]
        return step_seconds(groups, layers, weights, ahead=ahead)

    def sending_s(self, nbytes: float) -> float:
        """Seconds of the link for so many bytes; the first call of `layer` comes before."""
        return sending_seconds(nbytes, self.link_bytes_s)

    @property
    def measured(self) -> OffloadProfile | None:
        """The profile as it was measured, or read; None before the first call of `layer`."""
        return self._measured

    @property
    def link_bytes_s(self) -> float:
        """Bandwidth to the accelerator; 0 before the first call of `layer`."""
        return 0.0 if self.profile is None else self.profile.link_bytes_s

    @property
    def disk_bytes_s(self) -> float:
        """Bandwidth of reading the disk; 0 before the first call of `layer`, and without a disk."""
        return 0.0 if self.profile is None else self.profile.disk_read_bytes_s

    @property
    def settled(self) -> bool:
        """Whether what steps show has come in."""
        return self._steps > STEADY

    def learn(self, record: StepRecord, layers: int) -> None:
        """Take in what a step of decoding showed."""
        if not record.usual:
            return
        self._steps += 1
        shown = self._speeds(record, layers)
        for name, value in shown.items():
            self._shown.add(name, value, alone=self._steps <= STEADY)
        assert self.profile is not None
        self.profile = self.profile.model_copy(update={name: self._shown.get(name) for name in shown})
        self._learn_device(record, layers, self.profile.model_copy(update=shown))

    def _speeds(self, record: StepRecord, layers: int) -> dict[str, float]:
        """Of the profile, what a step showed."""
        profile, measured, division = self.profile, self._measured, record.division
        assert profile is not None and measured is not None
        found: dict[str, float] = {}
        if division.on_host >= FEW * division.tokens and record.host_s:
            known = shared_attend_seconds(measured.host_attend_s, self._sharers)
            calls = layers * sum(each.on_host > 0 for each in record.plan.divisions)
            fixed = calls * (measured.host_call_s + measured.host_fixed_s * record.sequences)
            by_token, whatever = shown_parts(record.host_s, layers * division.on_host * known, fixed)
            found["host_attend_s"] = by_token * measured.host_attend_s
            found |= {name: whatever * getattr(measured, name) for name in ("host_fixed_s", "host_call_s")}
        if division.recomputed >= FEW * division.tokens and record.recompute_s:
            chunks = sum(-(-each.recomputed // record.plan.chunk) for each in record.plan.divisions)
            fixed = layers * measured.launch_s * chunks
            known = layers * division.recomputed * measured.recompute_s
            by_token, whatever = shown_parts(record.recompute_s, known, fixed)
            found |= {"recompute_s": by_token * measured.recompute_s, "launch_s": whatever * measured.launch_s}
        enough = SOME * division.tokens * layers * profile.row_bytes
        plain_bytes, plain_s = record.timed_bytes - record.mixed_bytes, record.busy_s - record.mixed_s
        link = link_rate(plain_bytes, plain_s) if plain_bytes >= enough and plain_s > 0 else 0.0
        disk = 0.0
        if record.mixed_bytes >= enough and record.mixed_s:
            rates = link or profile.link_bytes_s, profile.disk_read_bytes_s
            by_mixed, disk = shown_rates(record.mixed_bytes, record.timed_disk_bytes, record.mixed_s, *rates)
            # Transfers without any row from disk say better what the link carries.
            link = link or by_mixed
        found |= {name: rate for name, rate in (("link_bytes_s", link), ("disk_read_bytes_s", disk)) if rate}
        return found

    def _learn_device(self, record: StepRecord, layers: int, profile: OffloadProfile) -> None:
        """Take in the other work of a layer in a step, and all that it cost, by a profile of that step alone."""
        tokens = record.division.tokens
        early, attended = self._steps <= STEADY, tokens - record.division.on_host
        # Other ranks are waited for in the midst of attention.
        if attended >= MANY * tokens and not record.peers_s:
            self._shown.add("attend_s", record.attend_s / (layers * attended), alone=early)
        others = record.waited_s + record.recompute_s + record.peers_s
        busy = other_work_seconds(record.elapsed_s - others, layers, attended, self._shown.get("attend_s"))
        self._shown.add("device_s", busy, alone=early)
        self._shown.add("outside_s", record.gap_s, alone=early)
        if record.steady:
            plan, costs = self._plans.setdefault(record.plan.name, _Shown()), self._layer(profile, record.sequences)
            values = {name: getattr(costs, name) for name in SHOWN_COSTS}
            for name, value in {**values, "device_s": busy, "attend_s": self._shown.get("attend_s")}.items():
                plan.add(name, value, alone=early)
