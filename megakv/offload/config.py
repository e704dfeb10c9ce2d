"""Section ``megakv.offload`` of the JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megakv.base.sections import OneOf, Section
from megakv.costmodel.stored_rows import OffloadSizes, may_pay
from megakv.offload.method import AUTO, METHODS, methods_of

GIB = 1 << 30
MOST = 1e9
"""Of any budget, bandwidth or size."""


class OffloadConfig(Section):
    """Keys and values off the accelerator, layer by layer."""

    enabled: bool = False
    """Whether keys and values lie in host memory or on disk: docs/offload.md."""

    method: Annotated[str, OneOf(lambda: (AUTO, *METHODS))] = AUTO
    """What becomes of offloaded tokens: docs/offload.md#how-tokens-are-divided. ``auto`` takes what is predicted
    to be fastest."""

    objective: Literal["latency", "throughput"] = "latency"
    """What ``num_gpu_batches`` is chosen for where it is left out: the shortest time of a step, row by row; or most
    tokens per second of a whole batch, column by column where that has no room otherwise:
    docs/offload.md#row-by-row-or-column-by-column."""

    weights: Literal[False, True, "disk"] = False
    """Whether the decoder layers' weights lie in host memory too (``true``), or on disk, and come layer by layer: what
    DeepSpeed's ``offload_param`` calls ``cpu`` and ``nvme``. They come out of ``host_gb``, or ``disk_gb``, first."""

    num_gpu_batches: int | None = Field(None, ge=1)
    """Groups in which the sequences of a batch go through each layer: keys and values are brought for one group at a
    time, one load of the layer's weights serves all. ``null``: as ``objective`` has it."""

    kv_bits: Literal[4, 8] | None = None
    """Bits of each key and value off the accelerator, **lossy**. ``null``: the model's own type."""

    kv_group: int = Field(64, ge=1)
    """With ``kv_bits``: at most so many elements of a head share a step and a smallest value."""

    host_gb: float = Field(4.0, gt=0, le=MOST)
    """Host memory of each rank in GiB: taken at start, page-locked where there is an accelerator."""

    disk_gb: float = Field(0.0, ge=0, le=MOST)
    """Disk space of each rank in GiB: one page or more, reserved at start, used where a layer's share of host memory
    is full."""

    disk_path: str = "."
    """Folder of the file on disk."""

    device_gb: float = Field(0.0, ge=0, le=MOST)
    """Accelerator memory of each rank in GiB for keys and values that stay there, the last ones of each sequence."""

    page_kib: int = Field(512, ge=1, le=MOST)
    """Size of the pages that host memory and disk are cut into."""

    chunk_tokens: int | None = Field(None, ge=1, le=MOST)
    """Tokens of a chunk of activations, of all sequences. ``null``: 256, and 16,384 on a GPU, which computes with fewer
    in less time than it takes to start that."""

    cpu_threads: int | None = Field(None, ge=1, le=4096)
    """Cores of each rank with which the host attends. ``null``: as many as the rank computes with."""

    emulated_link_gb_s: float | None = Field(None, ge=1e-6, le=MOST)
    """Without an accelerator: bandwidth of the emulated link in GB/s each way. ``null``: as fast as memory."""

    profile: str | None = None
    """File that the measured speeds of this machine are kept in. What it lacks is measured. It may be that of
    ``megakv profile``."""

    @property
    def groups(self) -> int:
        """Groups of a batch as they were given; row by row, 1, where they were not."""
        return self.num_gpu_batches or 1

    @property
    def sizes(self) -> OffloadSizes:
        """What the cost model needs to count bytes."""
        return OffloadSizes(
            page_bytes=self.page_kib << 10,
            device_bytes=int(self.device_gb * GIB),
            groups=self.groups,
            kv_bits=self.kv_bits,
            kv_group=self.kv_group,
            recomputes=self.recomputes,
        )

    @property
    def chooses_groups(self) -> bool:
        """Whether each batch has its own."""
        return self.objective == "throughput" and self.num_gpu_batches is None

    @property
    def host_bytes(self) -> int:
        """Host memory of each rank, in bytes."""
        return int(self.host_gb * GIB)

    @property
    def disk_bytes(self) -> int:
        """Disk space of each rank, in bytes."""
        return int(self.disk_gb * GIB)

    @property
    def host_attends(self) -> bool:
        """Whether the host's processor may attend."""
        return any(method.attends_on_host for method in methods_of(self.method).values())

    @property
    def recomputes(self) -> bool:
        """Whether the method may recompute."""
        return any(method.recomputes for method in methods_of(self.method).values())

    def chunk_on(self, device: str) -> int:
        """Tokens of a chunk on a type of device."""
        return self.chunk_tokens or (256 if device == "cpu" else 1 << 14)

    def keeps_inputs(self, input_bytes: int, kv_bytes: int) -> bool:
        """Whether activations are kept beside keys and values: where they are of use on some machine."""
        return self.recomputes and may_pay(input_bytes, kv_bytes)
