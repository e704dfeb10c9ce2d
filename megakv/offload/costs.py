"""What a layer of an engine's model costs here: from a profile, and from what steps show."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megakv.costmodel.hardware import HostProfile
from megakv.offload.equations import (
    GroupCosts,
    LayerCosts,
    WeightTimes,
    disk_seconds,
    shown_parts,
    shown_rates,
)
from megakv.offload.host_rank import HostRank
from megakv.offload.method import Split
from megakv.offload.pipeline import layer_times, step_seconds
from megakv.offload.profile import Profiler, recompute_operations
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
OF_A_PLAN = (
    *("kv_s", "activation_s", "disk_kv_s", "disk_activation_s"),
    *("recompute_s", "launch_s", "host_attend_s", "host_fixed_s"),
)
"""What is believed of each plan by itself, beside the accelerator's other work."""


class _Shown:
    """What the latest steps showed, quantity by quantity: medians, as single steps may have been disturbed."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SHOWN))

    def add(self, early: bool, **values: float) -> None:
        """Take in what a step showed; an early one makes those before it be forgotten."""
        for name, value in values.items():
            if early:
                self._samples[name].clear()
            self._samples[name].append(value)

    def get(self, name: str) -> float:
        """The median of a quantity; 0 if no step showed it."""
        return statistics.median(self._samples[name]) if self._samples.get(name) else 0.0

    def all(self) -> dict[str, float]:
        """Those of all quantities."""
        return {name: self.get(name) for name in self._samples}


@dataclass(frozen=True)
class LayerSpeeds:
    """A profile for the rows of one engine's layers; 0 stands for what was not measured, as no method needed it.

    `row_bytes` and `input_bytes` are those of a token's keys and values, and of its activations. `transfer_s` is what a
    transfer costs whatever its size, `launch_s` a recomputation beside `recompute_s` for each token, and the host's
    attention `host_fixed_s` for each sequence, and `host_call_s` at all, beside `host_attend_s` for each token.
    """

    row_bytes: float
    input_bytes: int
    link_bytes_s: float
    transfer_s: float
    recompute_s: float
    launch_s: float
    host_attend_s: float
    host_fixed_s: float
    host_call_s: float
    disk_read_bytes_s: float

    @classmethod
    def of(cls, profile: HostProfile, store: TieredStore, row_bytes: float, *, sharers: int) -> LayerSpeeds:
        """`sharers` ranks of a host divide the bandwidth of its disk, and that of its memory where they attend."""
        link, flops, attention = profile.host_link, profile.recompute_flops, profile.host_attention_bandwidth
        assert link is not None
        return cls(
            row_bytes=row_bytes,
            input_bytes=store.input_bytes,
            link_bytes_s=link.bandwidth,
            transfer_s=link.latency,
            recompute_s=recompute_operations(store) / flops if flops else 0.0,
            launch_s=profile.recompute_call_s,
            host_attend_s=sharers * row_bytes / attention if attention else 0.0,
            host_fixed_s=profile.host_sequence_s,
            host_call_s=profile.host_call_s,
            disk_read_bytes_s=(profile.disk_bandwidth or 0.0) / sharers,
        )

    def costs(self, sequences: float) -> LayerCosts:
        """What each token costs, and the host's part whatever its tokens, beside the accelerator's other work."""
        link, disk = self.link_bytes_s, self.disk_read_bytes_s
        return LayerCosts(
            kv_s=self.row_bytes / link,
            activation_s=self.input_bytes / link,
            recompute_s=self.recompute_s,
            transfer_s=self.transfer_s,
            launch_s=self.launch_s,
            host_attend_s=self.host_attend_s,
            host_fixed_s=self.host_call_s + self.host_fixed_s * sequences,
            disk_kv_s=disk_seconds(self.row_bytes, link, disk),
            disk_activation_s=disk_seconds(self.input_bytes, link, disk),
        )


class OffloadCosts:
    """Costs of a layer of an engine's model.

    What a layer computes beside recomputing differs by plan: transfers and the host's attention slow it in their own
    ways. So that is learned for every plan by itself.
    """

    def __init__(self, profiler: Profiler):
        self._profiler = profiler
        self.profile: LayerSpeeds | None = None
        self.measured: LayerSpeeds | None = None
        """As it was measured, or read; None before the first call of `layer`."""
        self._shown = _Shown()
        # Of each plan, by its groups of a batch.
        self._plans: dict[tuple[str, int], _Shown] = {}
        self._steps = 0

    def layer(
        self,
        store: TieredStore,
        recomputation: Recomputation | None,
        host: HostRank | None,
        *,
        groups: int = 1,
        row_bytes: Callable[[], float] | None = None,
    ) -> LayerCosts:
        """Costs of a layer that holds cached tokens, but for `device_s`, for one of `groups` groups of sequences.

        In the mean of all layers a token has `row_bytes`, the store's if None. The first call measures, or reads the
        profile; a ValueError says that it is of another machine.
        """
        known = self.profile
        if known is None or (host is not None and not known.host_attend_s) or store.input_bytes > known.input_bytes:
            found = self._profiler.profile(store, recomputation, host)
            mean = store.row_bytes if row_bytes is None else row_bytes()
            self.measured = self.profile = known = LayerSpeeds.of(found, store, mean, sharers=self._profiler.sharers)
        return replace(known.costs(len(store.lengths()) / groups), attend_s=self._shown.get("attend_s"))

    def of_plan(self, plan: str, groups: int, costs: LayerCosts) -> LayerCosts:
        """Costs as the latest steps of a plan showed them, in other groups if it had none in so many.

        Without any, they are with the other work of the least hampered plan.

        What other plans show since then is not its own: times of plans are compared as they were measured.
        """
        known = self._plans.get((plan, groups))
        if known is None:
            known = next((shown for (name, _), shown in self._plans.items() if name == plan), None)
        if known is None:
            shown = [each.get("device_s") for each in self._plans.values()]
            return replace(costs, device_s=min(shown, default=self._shown.get("device_s")))
        return replace(costs, **known.all())

    def predict(
        self, groups: Sequence[GroupCosts], splits: Sequence[Split], layers: int, weights: WeightTimes, *, ahead: bool
    ) -> float:
        """Seconds from step to step, with a split for each group; `ahead` as for `step_seconds`."""
        outside_s = self._shown.get("outside_s")
        times = [layer_times(*each, outside_s=outside_s) for each in zip(groups, splits, strict=True)]
        return step_seconds(times, layers, weights, ahead=ahead)

    @property
    def link_bytes_s(self) -> float:
        """Bandwidth to the accelerator; 0 before the first call of `layer`."""
        return 0.0 if self.profile is None else self.profile.link_bytes_s

    @property
    def disk_bytes_s(self) -> float:
        """Bandwidth of reading the disk; 0 before the first call of `layer`, and without a disk."""
        return 0.0 if self.profile is None else self.profile.disk_read_bytes_s

    @property
    def warmed_up(self) -> bool:
        """Whether what steps show has come in."""
        return self._steps > STEADY

    def learn(self, record: StepRecord, layers: int) -> None:
        """Take in what a step of decoding showed."""
        # A rank that has held none of the cached tokens so far has measured nothing.
        if not record.usual or self.profile is None:
            return
        self._steps += 1
        early, shown = self._steps <= STEADY, self._speeds(record, layers)
        self._shown.add(early, **shown)
        shown_lately: dict[str, Any] = {name: self._shown.get(name) for name in shown}
        self.profile = replace(self.profile, **shown_lately)
        tokens = record.split.tokens
        attended = tokens + record.kept - record.split.on_host
        # Other ranks are waited for in the midst of attention.
        if attended >= MANY * tokens and not record.peers_s:
            self._shown.add(early, attend_s=record.attend_s / (layers * attended))
        attend_s = self._shown.get("attend_s")
        busy_s = record.elapsed_s - record.waited_s - record.recompute_s - record.peers_s
        device_s = max(0.0, busy_s / layers - attend_s * attended)
        self._shown.add(early, device_s=device_s, outside_s=record.gap_s)
        if record.steady:
            costs = replace(self.profile, **shown).costs(record.sequences)
            own = {name: getattr(costs, name) for name in OF_A_PLAN}
            key = record.plan.name, len(record.plan.splits)
            self._plans.setdefault(key, _Shown()).add(early, **own, device_s=device_s, attend_s=attend_s)

    def _speeds(self, record: StepRecord, layers: int) -> dict[str, Any]:
        """Of the profile, what a step showed."""
        profile, measured, split = self.profile, self.measured, record.split
        assert profile is not None and measured is not None
        found: dict[str, Any] = {}
        hosted = split.on_host + record.kept_on_host
        if hosted >= FEW * (split.tokens + record.kept + record.kept_on_host) and record.host_s:
            calls = layers * sum(record.plan.kept_on_host or each.on_host > 0 for each in record.plan.splits)
            fixed = calls * (measured.host_call_s + measured.host_fixed_s * record.sequences)
            by_token, whatever = shown_parts(record.host_s, layers * hosted * measured.host_attend_s, fixed)
            found["host_attend_s"] = by_token * measured.host_attend_s
            found |= {name: whatever * getattr(measured, name) for name in ("host_fixed_s", "host_call_s")}
        if split.recomputed >= FEW * split.tokens and record.recompute_s:
            fixed = layers * measured.launch_s * sum(each.chunks for each in record.plan.splits)
            known = layers * split.recomputed * measured.recompute_s
            by_token, whatever = shown_parts(record.recompute_s, known, fixed)
            found |= {"recompute_s": by_token * measured.recompute_s, "launch_s": whatever * measured.launch_s}
        enough, sent = SOME * (split.tokens + record.kept) * layers * profile.row_bytes, record.traffic
        plain_bytes, plain_s = sent.timed_bytes - sent.mixed_bytes, sent.busy_s - sent.mixed_s
        link = plain_bytes / plain_s if plain_bytes >= enough and plain_s > 0 else 0.0
        disk = 0.0
        if sent.mixed_bytes >= enough and sent.mixed_s:
            rates = link or profile.link_bytes_s, profile.disk_read_bytes_s
            by_mixed, disk = shown_rates(sent.mixed_bytes, sent.timed_file_bytes, sent.mixed_s, *rates)
            # Transfers without any row from disk say better what the link carries.
            link = link or by_mixed
        return found | {name: rate for name, rate in (("link_bytes_s", link), ("disk_read_bytes_s", disk)) if rate}
