"""The hardware profile: what a machine was measured to do, in one JSON file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from megakv.base.device import LARGEST_REUSED_BYTES
from megakv.costmodel.curves import AttentionTable, Curve, RaggedTable
from megakv.costmodel.records import Record, load_record
from megakv.distributed.comm import Communicator
from megakv.tracking.machine import machine_info

Overhead = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Fingerprint(BaseModel):
    """What measured times belong to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    processor: str  # Model of the CPU; name of the accelerator, ``cpu`` without one.
    accelerator: str
    cores: int = Field(ge=1)  # Cores that a rank may use, and the threads it computes with.
    threads: int = Field(ge=1)
    hosts: int = Field(ge=1)  # Network stacks and ranks of the whole world.
    ranks: int = Field(ge=1)
    torch_version: str  # Version of torch; type of Q, K, V and weights, as in ``float32``.
    dtype: str

    @classmethod
    def of_this_process(cls, *, hosts: int, ranks: int, dtype: torch.dtype) -> Fingerprint:
        machine = machine_info()
        devices = machine["devices"]
        return cls(
            processor=machine["cpu"],
            accelerator=devices[0] if devices else machine["accelerator"],
            cores=machine["cores"],
            threads=torch.get_num_threads(),
            hosts=hosts,
            ranks=ranks,
            torch_version=torch.__version__,
            dtype=str(dtype).removeprefix("torch."),
        )

    def differences(self, here: Fingerprint) -> list[str]:
        """What another fingerprint has otherwise, in words."""
        mine, theirs = self.model_dump(), here.model_dump()
        return [f"{name} {mine[name]!r}, here {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]


class SumTimes(BaseModel):
    """Sums over ranks, by one of the ways to form them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: int = Field(ge=2)  # Neighbours that sum.
    shared_memory: bool = False  # Whether DeepSpeed's shared-memory operation did, which is for all ranks of one host.
    seconds: Curve  # Of one sum, over its bytes, one after another.
    wait_s: Overhead = 0.0  # What a sum takes longer behind work, which ranks do not end at the same moment.


class CallTimes(BaseModel):
    """Seconds of the processor that calls, where that is the one that computes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Of a layer, of a pass beside its layers, of a generated token beside its pass, of a generation beside its tokens.
    layer_s: Overhead = 0.0
    pass_s: Overhead = 0.0
    step_s: Overhead = 0.0
    begin_s: Overhead = 0.0


class HostProfile(Record):
    """What keys and values off the accelerator cost: its link, the host's processor and the disk; None: not known.

    An engine that offloads measures what its methods need and the file lacks, and adds it. Whatever else the file holds
    stays as it is.
    """

    model_config = ConfigDict(extra="allow")

    format: Literal["megakv hardware profile"] = "megakv hardware profile"
    version: Literal[1] = 1
    fingerprint: Fingerprint
    host_link: Curve | None = None  # Seconds of moving bytes between host and accelerator.
    emulated_link_gb_s: float | None = None  # Bandwidth that was emulated meanwhile, where there is no accelerator.
    # Operations per second of recomputing keys and values from activations (KVPR), and seconds of doing so at all.
    # None: as large matrix products.
    recompute_flops: float | None = Field(default=None, gt=0)
    recompute_call_s: Overhead = 0.0
    # Bytes of keys and values per second that one rank's processor attends to where they lie; seconds of doing so for
    # each sequence, and at all.
    host_attention_bandwidth: float | None = Field(default=None, gt=0)
    host_sequence_s: Overhead = 0.0
    host_call_s: Overhead = 0.0
    # Bytes per second that all ranks of a host together read from its disk, past the page cache where the file system
    # allows. None: there is none to use.
    disk_bandwidth: float | None = Field(default=None, gt=0)
    disk: str = ""  # The folder that was read, and how.


class HardwareProfile(HostProfile):
    """Measured times of one machine; every prediction starts here."""

    model_config = ConfigDict(extra="forbid")

    ring_size: int = Field(ge=1)  # Context-parallel degree that the exchanges and overheads were measured with.
    attention: tuple[AttentionTable, ...] = Field(min_length=1)  # Kernel times; one of kernel ``flash`` at least.
    matmul: Curve  # Seconds of a matrix product per weight element, over the tokens that go through it.
    # Seconds of copying, over bytes, into memory that is used again and again, and into memory newly asked for.
    copy_bytes: Curve
    copy_fresh: Curve
    # Seconds of merging a partial output in place, over its elements; of merging stacked partial outputs, over the
    # elements of all parts.
    merge: Curve
    combine: Curve
    # Seconds of one ring step (send to the next rank, receive from the previous one), over bytes, nothing else running.
    exchange: Curve
    # What part of an exchange that attention outlasts is paid all the same, and what part of attention that an exchange
    # outlasts: both take from one processor. 0 is perfect overlap, 1 none.
    exposed_transfer: Share
    exposed_compute: Share
    # How much longer the last of all ranks takes for a computation than any one typically does: what a collective that
    # nobody can leave early adds. 0 where nothing else runs on the machine.
    straggle: Overhead
    all_to_all: Curve  # Seconds of the collectives, over the bytes that a rank sends.
    all_gather: Curve
    # Per method, seconds of one of its N steps that none of the above explains (Python, bookkeeping).
    step_overhead_s: dict[str, Overhead]
    # Ring steps between ranks of one host, where `exchange` is of a ring between hosts. None: as `exchange`.
    exchange_inside: Curve | None = None
    # Steps of a sum over hosts, whose many connections may fill a link that the one of `exchange` does not. None: as
    # `exchange`.
    exchange_collective: Curve | None = None
    matmul_fp8: Curve | None = None  # `matmul` for row-wise FP8 weights. None: as `matmul`.
    # Seconds that issuing a layer's kernels takes: no layer is faster, however little it computes. 0 where the
    # processor that issues them is the one that computes.
    launch_s: Overhead = 0.0
    # Seconds that a layer's small operations take to be called, one by one, where the processor that calls them is the
    # one that computes.
    issue_s: Overhead = 0.0
    pass_s: Overhead = 0.0  # Seconds of a pass beside its layers and its logits.
    # Seconds that transformers' `generate` takes for a token beside its pass, and beside all of its tokens.
    step_s: Overhead = 0.0
    begin_s: Overhead = 0.0
    added: CallTimes = CallTimes()  # What MegaKV adds to `issue_s`, `pass_s`, `step_s` and `begin_s`.
    share_s: Overhead = 0.0  # Seconds until all ranks have what one of them found at the end of a pass.
    # How much longer the last of all ranks takes for matrix products of one token than such products take by
    # themselves: what is waited for where all ranks meet after them. Ranks of a host divide its memory bandwidth, and
    # not evenly at every moment.
    lag: Overhead = 0.0
    # Decode attention to heads that keep unequal numbers of tokens. Empty: as the flash kernel over as many tokens.
    ragged: tuple[RaggedTable, ...] = ()
    # Sums over ranks as they were measured; those of other numbers of ranks are worked out from ring steps.
    sums: tuple[SumTimes, ...] = ()
    # Bytes per second that all processors and links of a host together take from its memory. None: not known.
    host_memory_bandwidth: float | None = Field(default=None, gt=0)
    memory_bytes: int | None = Field(default=None, gt=0)  # Of one rank's accelerator. None: not known.
    host_memory_bytes: int | None = Field(default=None, gt=0)  # Of one host. None: not known.
    devices_per_host: int | None = Field(default=None, gt=0)  # Accelerators of one host. None: not known.

    @model_validator(mode="after")
    def _has_fused_kernel(self) -> Self:
        if all(table.kernel != "flash" for table in self.attention):
            raise ValueError("attention has no table of kernel 'flash'")
        return self

    def digest(self) -> str:
        """Of what all ranks must know alike: each host has a link and a disk of its own."""
        unknown = HostProfile(fingerprint=self.fingerprint)
        return Record.digest(self.model_copy(update=dict(unknown)))

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the ring's exchange beside attention that lasts as long: BW of the paper's equations."""
        return self.exchange.bandwidth / (1 + self.exposed_compute)

    def overlapped(self, compute_s: float, transfer_s: float) -> float:
        """Seconds until both end; while both run each goes slower by a constant factor, and then at full speed."""
        return max(compute_s + self.exposed_transfer * transfer_s, transfer_s + self.exposed_compute * compute_s)

    def sum_times(self, ranks: int, *, shared_memory: bool = False) -> SumTimes | None:
        found = (entry for entry in self.sums if (entry.ranks, entry.shared_memory) == (ranks, shared_memory))
        return next(found, None)

    def idle_s(self, work_s: float) -> float:
        """Seconds of a layer beside its work: until its kernels are issued."""
        return max(0.0, self.launch_s - work_s)

    @property
    def page_s(self) -> float:
        """Seconds for a byte of memory that the system gives anew: the most seen, as some blocks are used again."""
        fresh = self.copy_fresh
        sizes = [size for size in fresh.sizes if size > LARGEST_REUSED_BYTES]
        return max((max(0.0, fresh.at(size) - self.copy_bytes.at(size)) / size for size in sizes), default=0.0)

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second of copying large tensors, read and written once each."""
        return 2 * self.copy_bytes.bandwidth

    @property
    def matmul_flops(self) -> float:
        """Operations per second."""
        return 2 * self.matmul.sizes[-1] / self.matmul.seconds[-1]


def load_profile(path: str | Path, *, setting: str = "profile") -> HardwareProfile:
    """Read and check a profile. Raises ValueError naming the setting, the file and the field."""
    return load_record(HardwareProfile, path, setting=setting, remedy="write a new one with megakv profile --json FILE")


def count_hosts(comm: Communicator) -> int:
    """Hosts of the world, told apart by name and network stack. Every rank must call it."""
    try:
        network = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        network = ""
    return len(set(comm.gather_objects((socket.gethostname(), network))))


def fingerprint(comm: Communicator, dtype: torch.dtype) -> Fingerprint:
    """The machine of rank 0 and the world around it, on every rank. Every rank must call it."""
    hosts = count_hosts(comm)
    own = Fingerprint.of_this_process(hosts=hosts, ranks=comm.mesh.world_size, dtype=dtype)
    return comm.gather_objects(own)[0]
