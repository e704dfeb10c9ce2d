"""Section ``megakv.offload`` of the JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megakv.costmodel.offload import may_pay
from megakv.offload.methods import AUTO, METHODS, methods_of
from megakv.sections import OneOf, Section

GIB = 1 << 30
MOST = 1e9
"""Of any budget, bandwidth or size."""


class OffloadConfig(Section):
    """Keys and values off the accelerator, layer by layer."""

    enabled: bool = False
    """Whether keys and values lie in host memory or on disk."""

    method: Annotated[str, OneOf(lambda: (AUTO, *METHODS))] = AUTO
    """One of the registry, `megakv.offload.methods`, or ``auto``, the fastest of them."""

    weights: bool = False
    """Whether the decoder layers' weights lie in host memory too, and come layer by layer (Figure 3a)."""

    num_gpu_batches: int = Field(1, ge=1)
    """Groups that the sequences of a batch are decoded in, layer by layer, each with keys and values brought for itself
    alone, while one load of the layer's weights serves them all (column-by-column, Figure 4)."""

    kv_bits: Literal[4] | None = None
    """Bits of each key and value off the accelerator; the model's own type if left out. Four bits are lossy."""

    kv_group: int = Field(64, ge=1)
    """With `kv_bits`: elements along the head dimension that share a step and a smallest value, at most."""

    host_gb: float = Field(4.0, gt=0, le=MOST)
    """Host memory of each rank, in GiB: taken at start, page-locked where there is an accelerator."""

    disk_gb: float = Field(0.0, ge=0, le=MOST)
    """Disk space of each rank, in GiB: reserved at start, used where a layer's share of host memory is full."""

    disk_path: str = "."
    """Folder of the file."""

    disk_io: Literal["auto", "aio", "files"] = "auto"
    """How the file is read: ``aio`` through DeepSpeed's asynchronous I/O, built at start where that has not been done;
    ``files`` as any file; ``auto`` through asynchronous I/O where DeepSpeed was installed with it."""

    device_gb: float = Field(0.0, ge=0, le=MOST)
    """Accelerator memory of each rank, in GiB, for keys and values that stay there: the last ones of each sequence."""

    page_kib: int = Field(512, ge=1, le=MOST)
    """Size of the pages that both are cut into."""

    chunk_tokens: int = Field(256, ge=1, le=MOST)
    """Tokens of a chunk of activations."""

    cpu_threads: int | None = Field(None, ge=1, le=4096)
    """Cores of each rank with which the host attends; as many as the rank computes with if left out."""

    emulated_link_gb_s: float | None = Field(None, ge=1e-6, le=MOST)
    """Without an accelerator: bandwidth of the emulated link, in GB/s each way; as fast as memory if left out."""

    profile: str | None = None
    """File that the measured speeds of this machine are kept in; what it lacks is measured."""

    @property
    def host_bytes(self) -> int:
        """Host memory of each rank, in bytes."""
        return int(self.host_gb * GIB)

    @property
    def host_attends(self) -> bool:
        """Whether the host's processor may attend: to keys and values in the model's type, where the method has it."""
        return self.kv_bits is None and any(method.attends_on_host for method in methods_of(self.method).values())

    @property
    def recomputes(self) -> bool:
        """Whether the method may recompute."""
        return any(method.recomputes for method in methods_of(self.method).values())

    def keeps_inputs(self, input_bytes: int, kv_bytes: int) -> bool:
        """Whether activations are kept beside keys and values: asked for, or of use on some machine."""
        return self.recomputes and (self.method != AUTO or may_pay(input_bytes, kv_bytes))
