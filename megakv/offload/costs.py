"""What a layer of an engine's model costs here: from a profile, and from what steps show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megakv.costmodel.offload import LayerCosts, shared_attend_seconds
from megakv.costmodel.offload_pipeline import WeightTimes, group_times, step_seconds
from megakv.offload.division import Division
from megakv.offload.profiler import HostTrial, OffloadProfile, Profiler
from megakv.offload.record import StepRecord

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.store import TieredStore

LEARNING = 0.3
"""Weight of the latest step in what is learned while tokens are generated."""
STEADY = 3
"""Steps after which learned times count: the first ones fill caches and pipelines."""
FEW, SOME, MANY = 1 / 8, 1 / 4, 1 / 2
"""Parts of the cached tokens. What concerns less than that of them shows its overhead rather than its speed: calls that
compute with many weights show their speed early, transfers later, and attention last."""


class OffloadCosts:
    """Costs of a layer of an engine's model.

    What a layer computes beside recomputing differs by plan: transfers and the host's attention slow it in their own
    ways. So that is learned for every plan by itself.

    Parameters
    ----------
    profiler : Profiler
    device : torch.device
    sharers : int
        Ranks on this host: they share the bandwidth of its memory when they attend there.
    """

    def __init__(self, profiler: Profiler, device: torch.device, *, sharers: int = 1):
        self._profiler = profiler
        self._sharers = sharers
        self._device = device
        self.profile: OffloadProfile | None = None
        self.outside_s = 0.0
        self._latest_s = self._attend_s = 0.0
        self._plans: dict[str, dict[str, float]] = {}
        self._steps = 0

    def layer(self, store: TieredStore, recomputation: Recomputation | None, host: HostTrial | None) -> LayerCosts:
        """Costs of a layer that holds cached tokens, but for `device_s`; the first call measures, or reads the profile.

        Raises
        ------
        ValueError
            If the profile is of another machine or model.
        """
        if self.profile is None:
            self.profile = self._profiler.profile(store, recomputation, host)
        profile = self.profile
        return LayerCosts(
            kv_s=profile.row_bytes / profile.link_bytes_s,
            activation_s=profile.input_bytes / profile.link_bytes_s,
            recompute_s=profile.recompute_s,
            transfer_s=profile.transfer_s,
            launch_s=profile.launch_s,
            host_attend_s=shared_attend_seconds(profile.host_attend_s, self._sharers),
            host_fixed_s=profile.host_fixed_s * len(store.lengths()),
            attend_s=self._attend_s,
        )

    def of_plan(self, plan: str, costs: LayerCosts) -> LayerCosts:
        """Costs as the latest steps of a plan showed them; without any, with the other work of the least hampered plan.

        What other plans show since then is not its own: times of plans are compared as they were measured.
        """
        known = self._plans.get(plan)
        if known is None:
            least = min((each["device_s"] for each in self._plans.values()), default=self._latest_s)
            return replace(costs, device_s=least)
        return replace(costs, **known)

    def predict(
        self,
        costs: LayerCosts,
        divisions: Sequence[Division],
        layers: int,
        weights: WeightTimes,
        *,
        chunk: int,
        ahead: bool,
    ) -> float:
        """Seconds from step to step, of a division for each group; `costs` are of one group, `chunk` is in tokens."""
        groups = [
            group_times(
                costs,
                each.recomputed,
                each.on_host,
                each.streamed,
                chunk=chunk,
                outside_s=self.outside_s,
                resident=each.resident,
            )
            for each in divisions
        ]
        return step_seconds(groups, layers, weights, ahead=ahead)

    def sending_s(self, nbytes: float) -> float:
        """Seconds of the link for so many bytes; the first call of `layer` comes before."""
        assert self.profile is not None
        return nbytes / self.profile.link_bytes_s

    @property
    def link_bytes_s(self) -> float:
        """Bandwidth to the accelerator; 0 before the first call of `layer`."""
        return 0.0 if self.profile is None else self.profile.link_bytes_s

    @property
    def settled(self) -> bool:
        """Whether what steps show has come in, where it does."""
        return self._device.type != "cpu" or self._steps > STEADY

    def learn(self, record: StepRecord, layers: int) -> None:
        """Take in what a step of decoding showed.

        Only a processor that computes as it is told can be timed from outside; the host's attention always is.
        """
        assert self.profile is not None
        if not record.usual:
            return
        changes: dict[str, float] = {}
        busy = 0.0
        self._steps += 1
        weight = LEARNING if self._steps > STEADY else 1.0
        division, profile = record.division, self.profile
        if division.on_host >= FEW * record.cached and record.host_s:
            fixed = profile.host_fixed_s * record.new / division.on_host
            shown = record.host_s / (layers * division.on_host)
            known = shared_attend_seconds(profile.host_attend_s, self._sharers) + fixed
            changes["host_attend_s"] = profile.host_attend_s * (1 + weight * (shown / known - 1))
        if self._device.type == "cpu":
            busy = self._learn_device(record, layers, weight)
            if division.recomputed >= FEW * record.cached and record.recompute_s:
                shown = record.recompute_s / (layers * division.recomputed)
                chunks = sum(-(-each.recomputed // record.plan.chunk) for each in record.plan.divisions)
                known = profile.recompute_s + profile.launch_s * chunks / division.recomputed
                changes["recompute_s"] = profile.recompute_s * (1 + weight * (shown / known - 1))
            if record.bytes_in >= SOME * record.cached * layers * profile.row_bytes and record.busy_s:
                shown = record.bytes_in / record.busy_s
                changes["link_bytes_s"] = profile.link_bytes_s + weight * (shown - profile.link_bytes_s)
        if changes:
            self.profile = profile.model_copy(update=changes)
        if self._device.type == "cpu" and record.steady:
            before = self._plans.get(record.plan.name, {}).get("device_s", busy)
            shown = before + weight * (busy - before)
            self._plans[record.plan.name] = {
                "device_s": shown,
                "attend_s": self._attend_s,
                "kv_s": self.profile.row_bytes / self.profile.link_bytes_s,
                "activation_s": self.profile.input_bytes / self.profile.link_bytes_s,
                "recompute_s": self.profile.recompute_s,
                "host_attend_s": shared_attend_seconds(self.profile.host_attend_s, self._sharers),
            }

    def _learn_device(self, record: StepRecord, layers: int, weight: float) -> float:
        """Seconds of a layer's other work in a step."""
        attended = record.cached - record.division.on_host
        # Other ranks are waited for in the midst of attention.
        if attended >= MANY * record.cached and not record.peers_s:
            self._attend_s += weight * (record.attend_s / (layers * attended) - self._attend_s)
        others = record.waited_s + record.recompute_s + record.peers_s + self._attend_s * layers * attended
        busy = max(0.0, record.elapsed_s - others) / layers
        self._latest_s += weight * (busy - self._latest_s)
        self.outside_s += weight * (record.gap_s - self.outside_s)
        return busy
