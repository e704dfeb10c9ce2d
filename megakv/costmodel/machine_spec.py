"""What a machine's data sheet says, as a hardware profile: all predictions work with it as with a measured one."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from megakv.costmodel.curves import AttentionTable, Curve, Positive
from megakv.costmodel.hardware import Fingerprint, HardwareProfile, Overhead, Share
from megakv.costmodel.records import Record

HEADS = 8
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
METHODS = ("pass_kv", "pass_q", "all_gather", "replicated")
LARGE = 1e6
"""Rows, keys and tokens that everything is proportional from, long before."""
MERGE_BYTES = 12
"""Of one element of a partial output that is merged in place: two are read and one is written, in float32."""
COMBINE_BYTES = 4
"""Of one element of a stacked partial output."""
ALIKE = (
    *("memory_bytes", "host_memory_bytes", "host_memory_bandwidth", "disk_bandwidth"),
    *("exposed_transfer", "exposed_compute"),
)
"""What a profile and a data sheet have in the same terms."""


class Link(BaseModel):
    """What carries messages between two ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bandwidth: Positive  # Bytes per second that one rank reaches with one other, one way.
    latency_s: Positive  # Seconds of an empty message.
    # Bytes per second that one rank reaches with several others at a time: more connections may fill a link that one
    # does not. None: as `bandwidth`.
    collective_bandwidth: Positive | None = None

    @classmethod
    def of(cls, curve: Curve) -> Link:
        return cls(bandwidth=curve.bandwidth, latency_s=curve.latency)

    def curve(self) -> Curve:
        """Seconds of a message over its bytes."""
        return Curve.affine(self.latency_s, self.bandwidth)

    def collective(self, *, messages: int = 1, fixed_s: float = 0.0) -> Curve:
        """Seconds of a collective over the bytes that a rank sends, in so many messages one after another."""
        bandwidth = self.collective_bandwidth or self.bandwidth
        return Curve.affine(fixed_s + messages * self.latency_s, bandwidth)


class MachineSpec(Record):
    """A kind of machine, in the numbers of its data sheet and what part of them is reached."""

    format: Literal["megakv machine"] = "megakv machine"
    version: Literal[1] = 1
    name: str
    accelerator: str
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"  # Of weights and cache, as in ``bfloat16``.
    devices_per_host: int = Field(ge=1)  # Accelerators of one host; each is one rank.
    memory_bytes: int = Field(gt=0)  # Of one accelerator.
    # Of one host; its accelerators share it. None: not known, and offloading is not limited.
    host_memory_bytes: int | None = Field(default=None, gt=0)
    memory_bandwidth: Positive  # Its peak, bytes per second.
    peak_flops: Positive  # Operations per second in `dtype`.
    fp8_flops: Positive | None = None  # Operations per second in FP8. None: FP8 weights are computed in `dtype`.
    inside: Link  # Between two ranks of one host, and of two hosts.
    between: Link
    host: Link  # Between host memory and accelerator.
    # Bytes per second that all processors and links of a host together take from its memory. None: not known, and the
    # host is not asked to attend.
    host_memory_bandwidth: Positive | None = None
    # Bytes per second that all ranks of a host together read from its disk. None: there is none to use.
    disk_bandwidth: Positive | None = None
    # Space on the disk of one host; its accelerators share it. None: not known, and not limited.
    disk_bytes: int | None = Field(default=None, gt=0)
    # What part of the peaks matrix products, attention and reading memory reach.
    matmul_efficiency: float = Field(gt=0, le=1)
    attention_efficiency: float = Field(gt=0, le=1)
    memory_efficiency: float = Field(gt=0, le=1)
    # What part of the peak recomputing keys and values from activations reaches (KVPR). None: as matrix products.
    recompute_efficiency: float | None = Field(default=None, gt=0, le=1)
    # What part of a causal square's scores attention computes: half where masked ones are skipped, 1 where all are
    # computed first and masked then.
    causal_share: float = Field(default=0.5, gt=0, le=1)
    # Bytes that attention moves for each score of each head: 0 for fused kernels, which keep scores on the chip.
    score_bytes: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    exposed_transfer: Share = 0.0  # As in a profile: 0 where messages take nothing from what computes.
    exposed_compute: Share = 0.0
    kernel_s: Positive = 2e-6  # Seconds that a kernel takes at least.
    launch_s: Overhead = 0.0  # As in a profile.
    step_s: Overhead = 0.0  # Seconds of each of a method's steps that the host takes to issue it.
    # Seconds of a collective beside attention that its link does not take: packing, permuting, waiting for all ranks.
    collective_s: Overhead = 0.0

    @property
    def element_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    def host_share(self, accelerators: int) -> int | None:
        """Host memory of each of so many accelerators, which fill hosts one by one; None: not known."""
        if self.host_memory_bytes is None:
            return None
        return self.host_memory_bytes // min(self.devices_per_host, accelerators)

    def hosts(self, ranks: int) -> int:
        return -(-ranks // self.devices_per_host)

    def profile(self, *, cp_size: int = 2, tp_size: int = 1, captured: bool = False) -> HardwareProfile:
        """The profile that these numbers make of a mesh. Raises ValueError if a degree is not positive.

        Tensor-parallel ranks are neighbours: the ring of the context-parallel ones stays inside a host only where the
        whole mesh does. `captured` says whether a pass is replayed as one CUDA graph, so that the host issues nothing.
        """
        if cp_size < 1 or tp_size < 1:
            raise ValueError(f"cp_size = {cp_size} and tp_size = {tp_size}: allowed: 1 or more")
        hosts = self.hosts(cp_size * tp_size)
        ring = self.inside if hosts == 1 else self.between
        others = max(1, cp_size - 1)
        bandwidth = self.memory_bandwidth * self.memory_efficiency
        copy = Curve.affine(self.kernel_s, bandwidth / 2)
        return HardwareProfile(
            fingerprint=Fingerprint(
                processor=self.name,
                accelerator=self.accelerator,
                cores=1,
                threads=1,
                hosts=hosts,
                ranks=cp_size * tp_size,
                torch_version="any",
                dtype=self.dtype,
            ),
            ring_size=cp_size,
            attention=tuple(map(self._attention, HEAD_DIMS)),
            matmul=self._matmul(self.element_bytes, self.peak_flops),
            matmul_fp8=self._matmul(1, self.fp8_flops or self.peak_flops),
            copy_bytes=copy,
            copy_fresh=copy,
            merge=Curve.affine(self.kernel_s, bandwidth / MERGE_BYTES),
            combine=Curve.affine(self.kernel_s, bandwidth / COMBINE_BYTES),
            exchange=ring.curve(),
            exchange_inside=self.inside.curve(),
            exchange_collective=self.between.collective(),
            straggle=0.0,
            all_to_all=ring.collective(fixed_s=self.collective_s),
            all_gather=ring.collective(messages=others, fixed_s=self.collective_s),
            step_overhead_s=dict.fromkeys(METHODS, 0.0 if captured else self.step_s),
            launch_s=0.0 if captured else self.launch_s,
            recompute_flops=None if self.recompute_efficiency is None else self.peak_flops * self.recompute_efficiency,
            host_link=self.host.curve(),
            devices_per_host=self.devices_per_host,
            **{name: getattr(self, name) for name in ALIKE},
        )

    def _matmul(self, element_bytes: int, flops: float) -> Curve:
        """Seconds per weight element over tokens: reading the weight, or computing with it, whichever is longer."""
        reading = element_bytes / (self.memory_bandwidth * self.memory_efficiency)
        computing = 2 / (flops * self.matmul_efficiency)
        knee = reading / computing
        first = min(1.0, knee / 2)
        return Curve(sizes=(first, knee, knee * LARGE), seconds=(reading, reading, reading * LARGE))

    def _attention(self, head_dim: int) -> AttentionTable:
        """Attention likewise, over rows and keys: reading keys and values, or computing scores and sums with them."""
        bandwidth = self.memory_bandwidth * self.memory_efficiency
        pair_s = 4 * head_dim / (self.peak_flops * self.attention_efficiency) + self.score_bytes / bandwidth
        pairs_s = 1 / (HEADS * pair_s)
        reading = 2 * HEADS * head_dim * self.element_bytes / bandwidth
        knee = max(reading * pairs_s, 1.5)

        def seconds(rows: float, keys: float) -> float:
            # From the knee on time is taken to grow with rows, and a launch does not.
            return keys * max(reading, rows / pairs_s) + (self.kernel_s if rows < knee else 0.0)

        rows, keys = (1.0, knee, knee * LARGE), (1.0, LARGE)
        return AttentionTable(
            kernel="flash",
            head_dim=head_dim,
            heads=HEADS,
            group=1,
            rows=rows,
            keys=keys,
            seconds=tuple(tuple(seconds(row, key) for key in keys) for row in rows),
            causal=Curve.affine(self.kernel_s, pairs_s / self.causal_share, up_to=LARGE**2),
        )


def machine_of(profile: HardwareProfile) -> MachineSpec:
    """A measured machine in the terms of a data sheet, all efficiencies 1; a ValueError where it has no memory."""
    if profile.memory_bytes is None:
        raise ValueError(
            "the hardware profile does not say how much memory a rank has; write a new one with megakv profile "
            "--json FILE, or add memory_bytes to it"
        )
    table = next(table for table in profile.attention if table.kernel == "flash")
    peak = max(profile.matmul_flops, table.flops, profile.recompute_flops or 0.0)

    return MachineSpec(
        name=profile.fingerprint.processor,
        accelerator=profile.fingerprint.accelerator,
        dtype=profile.fingerprint.dtype,  # type: ignore[arg-type]
        devices_per_host=profile.devices_per_host or -(-profile.fingerprint.ranks // profile.fingerprint.hosts),
        memory_bandwidth=profile.memory_bandwidth,
        peak_flops=peak,
        inside=Link.of(profile.exchange_inside or profile.exchange),
        between=Link.of(profile.exchange),
        host=Link.of(profile.host_link or profile.copy_bytes),
        matmul_efficiency=profile.matmul_flops / peak,
        attention_efficiency=table.flops / peak,
        memory_efficiency=1.0,
        recompute_efficiency=None if profile.recompute_flops is None else profile.recompute_flops / peak,
        launch_s=profile.launch_s,
        **{name: getattr(profile, name) for name in ALIKE},
    )
