"""Machines by name: those of the papers, and others that are common."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from megakv.costmodel.hardware import HardwareProfile, load_profile
from megakv.costmodel.machine_spec import Link, MachineSpec, machine_of
from megakv.costmodel.records import load_record

GB = 10**9

RECOMPUTED = 0.053
"""What part of an A100's peak KVPR's times imply for recomputing keys and values; assumed of other GPUs, too."""

# What is reached of the data sheet is what benchmarks/validate_papers.py finds in the papers' own times. Guesses are
# what these cannot tell: launches on H100s, where decoding is replayed as a CUDA graph; NVLink, which is fast enough in
# KV-Runahead to be any; flash attention on A100s. Hosts are taken to have the memory that such hosts are sold with.
_H100 = MachineSpec(
    name="h100-rdma",
    accelerator="NVIDIA H100 96GB, 500 W",
    devices_per_host=8,
    memory_bytes=96 * GB,
    host_memory_bytes=2000 * GB,
    memory_bandwidth=2.4e12,
    peak_flops=800e12,
    fp8_flops=1600e12,
    inside=Link(bandwidth=370e9, latency_s=1.5e-6),
    between=Link(bandwidth=25.5e9, latency_s=27.7e-6, collective_bandwidth=43.6e9),
    host=Link(bandwidth=50e9, latency_s=10e-6),
    matmul_efficiency=0.519,
    attention_efficiency=0.673,
    memory_efficiency=0.649,
    recompute_efficiency=RECOMPUTED,
    step_s=2.9e-4,
    collective_s=7.04e-5,
)
_A100 = MachineSpec(
    name="a100-nvlink",
    accelerator="NVIDIA A100 80GB",
    devices_per_host=8,
    memory_bytes=80 * GB,
    host_memory_bytes=2000 * GB,
    memory_bandwidth=2.0e12,
    peak_flops=312e12,
    inside=Link(bandwidth=240e9, latency_s=5e-6),
    between=Link(bandwidth=22e9, latency_s=27e-6),
    host=Link(bandwidth=26.5e9, latency_s=10e-6),
    matmul_efficiency=0.503,
    attention_efficiency=0.6,
    memory_efficiency=0.8,
    recompute_efficiency=RECOMPUTED,
    launch_s=3.07e-3,
)

PRESETS: dict[str, MachineSpec] = {
    machine.name: machine
    for machine in (
        # Context parallelism, Section 4.1: Grand Teton hosts with 400 Gb/s RDMA per GPU (GTT), and with 100 Gb/s TCP of
        # which some 3 GB/s were reached (GTI).
        _H100,
        _H100.model_copy(update={"name": "h100-tcp", "between": Link(bandwidth=3e9, latency_s=60e-6)}),
        _A100,
        # Without NVLink: peers reach each other over PCIe 4.0 x16 too. KVPR's machine; its host memory is a guess.
        _A100.model_copy(
            update={
                "name": "a100-pcie4",
                "accelerator": "NVIDIA A100 40GB PCIe",
                "memory_bytes": 40 * GB,
                "host_memory_bytes": 512 * GB,
                "memory_bandwidth": 1.555e12,
                "inside": Link(bandwidth=20e9, latency_s=10e-6),
            }
        ),
        # Four cores of a server, one for each rank, with gloo over loopback and 10 Gbit/s.
        MachineSpec(
            name="cpu",
            accelerator="cpu",
            dtype="float32",
            devices_per_host=4,
            memory_bytes=16 * GB,
            host_memory_bytes=64 * GB,
            memory_bandwidth=10e9,
            peak_flops=100e9,
            inside=Link(bandwidth=1.8e9, latency_s=200e-6),
            between=Link(bandwidth=1.1e9, latency_s=300e-6),
            host=Link(bandwidth=10e9, latency_s=1e-6),
            matmul_efficiency=0.8,
            attention_efficiency=0.5,
            memory_efficiency=0.8,
            exposed_transfer=0.1,
            exposed_compute=0.1,
            kernel_s=10e-6,
            step_s=100e-6,
        ),
    )
}


@dataclass(frozen=True)
class Hardware:
    """A machine to predict for."""

    spec: MachineSpec  # Memory, devices of a host and links.
    measured: HardwareProfile | None = None  # Where it was measured; predictions then start from that.

    def on_mesh(self, *, cp_size: int, tp_size: int = 1) -> HardwareProfile:
        """The profile to predict a mesh with. A measured one is what it is: its ring is the one it was measured on."""
        return self.measured or self.spec.profile(cp_size=cp_size, tp_size=tp_size)


def hardware(name_or_path: str | Path, *, setting: str = "hardware") -> Hardware:
    """A preset by name; or the machine of a file: a measured profile, or a data sheet. Raises ValueError."""
    text = str(name_or_path)
    if text in PRESETS:
        return Hardware(PRESETS[text])
    if not Path(text).is_file():
        near = difflib.get_close_matches(text.lower(), PRESETS, n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(
            f"{setting} = {text!r} is neither a file nor a known machine; {hint}known: {', '.join(PRESETS)}"
        )
    if f'"{MachineSpec.model_fields["format"].default}"' in Path(text).read_text(encoding="utf-8", errors="replace"):
        return Hardware(load_record(MachineSpec, text, setting=setting, remedy="start from one that megakv writes"))
    measured = load_profile(text, setting=setting)
    return Hardware(machine_of(measured), measured)
