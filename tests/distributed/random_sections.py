"""Random settings of an engine, drawn from all registries: prefill, decoding, offloading, compression, placement."""

from __future__ import annotations

from random import Random
from typing import Any

from megakv.attention.methods import decode_methods, prefill_methods
from megakv.fairkv.methods import METHODS as COMPRESSION
from megakv.offload.method import AUTO, METHODS

MISSING = (r"megakv\.weights\.format = 'fp8' is not supported for model type .* holds the weights of several experts",)
"""What is refused by no law: features that are missing. A line goes when its feature comes."""
UNBOUND = 4096
"""A budget that no conversation comes up to."""
DRAWN = "drawn"
"""Stands for a file that is written where the section is used."""


def is_lossy(section: dict[str, Any]) -> bool:
    """Whether answers are others than the plain model's."""
    budget, offload = section.get("fairkv", {}).get("budget", 1.0), section.get("offload", {})
    return budget not in (1.0, UNBOUND) or "kv_bits" in offload or bool(section.get("weights"))


def lossy_part(section: dict[str, Any]) -> dict[str, Any]:
    """What of a section changes answers: for one rank, which offloads nothing, but where few bits are asked for."""
    part: dict[str, Any] = {"timeout_s": 120}
    fairkv = {key: value for key, value in section.get("fairkv", {}).items() if key not in ("mapping", "copies")}
    part |= {"fairkv": fairkv} if fairkv else {}
    part |= {key: section[key] for key in ("weights",) if key in section}
    bits = {key: value for key, value in section.get("offload", {}).items() if key in ("kv_bits", "kv_group")}
    if bits:
        part["offload"] = {"enabled": True, "method": "stream", "host_gb": 0.05, "page_kib": 8, **bits}
    return part


def draw_section(rng: Random, cp: int, tp: int, *, lossy: bool = True) -> dict[str, Any]:
    """A configuration, an exact one or perhaps a `lossy` one. Some are refused at start, as they should be."""
    prefill = rng.choice(("auto", *prefill_methods(), "runahead"))
    parallel = {"size": cp, "prefill": prefill, "decode": rng.choice(("auto", "auto", *decode_methods()))}
    section: dict[str, Any] = {"context_parallel": parallel, "timeout_s": 120}
    if prefill == "runahead":
        section["runahead"] = draw_chain(rng, cp)
        if section["runahead"]["kv"] == "last" and rng.random() < 0.9:
            parallel["decode"] = "auto"
    kind = rng.random()
    if kind < 0.43:
        section["offload"] = offload = draw_offload(rng, lossy=lossy)
        gathers = section.get("runahead", {}).get("kv") == "last"
        if gathers and "kv_bits" not in offload and rng.random() < 0.9:
            offload["method"] = rng.choice((AUTO, "stream", "cpu_rank"))
    if 0.25 <= kind < 0.75:
        section["fairkv"] = draw_compression(rng, lossy=lossy and rng.random() < 0.7)
    if tp > 1 and rng.random() < 0.35:
        section.setdefault("fairkv", {}).update(mapping=DRAWN, copies=rng.choice(("tokens", "batch")))
    if lossy and tp == 1 and rng.random() < 0.12:
        # A rank's part of a row has a scale of its own: each TP degree has its own rounding.
        section["weights"] = {"format": "fp8"}
    return section


def draw_compression(rng: Random, *, lossy: bool) -> dict[str, Any]:
    """Section ``fairkv``; where nothing may be lost, all goes through selection and ragged stores all the same."""
    method = rng.choice(tuple(COMPRESSION))
    own: dict[str, tuple[Any, ...]] = {
        "sinks": (0, 4),
        "window": (4, 8),
        "observe": ("window", "prompt"),
        "reduce": ("mean", "peak"),
        "pool": (1, 3, 7),
        "decay": (2.0, 20.0),
        "recent": (0.2, 0.5),
        "safeguard": (0.2, 1.0),
        "spread": (1.2, 3.0),
        "importance": (DRAWN,),
    }
    fairkv = {"method": method, "budget": rng.choice((0.25, 0.5, 12, 30)) if lossy else 1.0}
    fairkv |= {name: rng.choice(own[name]) for name in COMPRESSION[method].model_fields if name in own}
    if rng.random() < 0.4:
        # Of an answer of any length no fraction can be kept.
        fairkv |= {"budget": rng.choice((12, 30)) if lossy else UNBOUND, "decode_interval": rng.choice((1, 3, 10, 40))}
    return fairkv | {"min_tokens": rng.choice((2, 20, 60))}


def draw_chain(rng: Random, cp: int) -> dict[str, Any]:
    """Section ``runahead``."""
    partition: Any = rng.choice(("auto", "even", "fractions"))
    if partition == "fractions":
        parts = [rng.choice((0, 1, 2, 5)) for _ in range(cp - 1)] + [rng.choice((1, 3))]
        partition = [part / sum(parts) for part in rng.sample(parts, cp)]
    kv = rng.choice(("sharded", "last"))
    return {"kv": kv, "partition": partition, "chunk_tokens": rng.choice((1, 3, 16, 64, 1024))}


def draw_offload(rng: Random, *, lossy: bool) -> dict[str, Any]:
    """Section ``offload``; a slow link makes recomputation and the host's attention pay."""
    page = rng.choice((4, 8, 16))
    offload: dict[str, Any] = {
        "enabled": True,
        "method": rng.choice((AUTO, *METHODS)),
        "weights": rng.random() < 0.3,
        "objective": rng.choice(("latency", "throughput")),
        "num_gpu_batches": rng.choice((None, 1, 2, 3)),
        "host_gb": rng.choice((0.03, 0.05)),
        "page_kib": page,
        "chunk_tokens": rng.choice((1, 7, 16, 64)),
    }
    speed = rng.choice((None, 0.0005, 0.002, 0.02, 0.2))
    if speed is not None:
        offload["emulated_link_gb_s"] = speed * (30 if offload["weights"] else 1)
    if rng.random() < 0.3:
        offload["device_gb"] = rng.choice((4e-6, 4e-5, 4e-4, 0.01))
    if rng.random() < 0.25:
        # A few pages in memory, the rest on disk.
        offload["disk_gb"] = 0.05
        offload["weights"] = offload["weights"] and rng.choice((True, "disk"))
        if offload["weights"] is not True:
            offload["host_gb"] = rng.choice((8, 24)) * page / (1 << 20)
    if lossy and rng.random() < 0.3:
        # What is recomputed, or stays on the device, loses nothing; how much that is, the clock or the mesh says.
        offload |= {"kv_bits": rng.choice((4, 8)), "kv_group": rng.choice((4, 64))}
        offload["method"] = rng.choice([name for name, method in METHODS.items() if not method.recomputes])
        offload.pop("device_gb", None)
    return offload
