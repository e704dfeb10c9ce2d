"""Random settings of an engine: every method of prefill and decoding, chains, offloading, budgets of everything."""

from __future__ import annotations

from random import Random
from typing import Any

from megakv.attention.methods import decode_methods, prefill_methods
from megakv.offload.methods import AUTO, METHODS


def draw_section(rng: Random, cp: int) -> dict[str, Any]:
    """A configuration. Some are refused at start, as they should be."""
    prefill = rng.choice(("auto", *prefill_methods(), "runahead"))
    parallel = {"size": cp, "prefill": prefill, "decode": rng.choice(("auto", "auto", *decode_methods()))}
    section: dict[str, Any] = {"context_parallel": parallel, "timeout_s": 120}
    if prefill == "runahead":
        section["runahead"] = draw_chain(rng, cp)
        if section["runahead"]["kv"] == "last" and rng.random() < 0.9:
            parallel["decode"] = "auto"
    kind = rng.random()
    if kind < 0.45:
        section["offload"] = draw_offload(rng)
        if section.get("runahead", {}).get("kv") == "last" and rng.random() < 0.9:
            section["offload"]["method"] = rng.choice((AUTO, "stream", "cpu_rank"))
    elif kind < 0.6:
        # Budgets of the whole prompt: all of it goes through selection and ragged stores, and nothing is lost.
        method = rng.choice(("snapkv", "pyramidkv", "ada_snapkv", "h2o", "streaming_llm"))
        section["fairkv"] = {"budget": 1.0, "method": method, "min_tokens": rng.choice((2, 20, 60))}
    return section


def draw_chain(rng: Random, cp: int) -> dict[str, Any]:
    """Section ``runahead``."""
    partition: Any = rng.choice(("auto", "even", "fractions"))
    if partition == "fractions":
        parts = [rng.choice((0, 1, 2, 5)) for _ in range(cp - 1)] + [rng.choice((1, 3))]
        partition = [part / sum(parts) for part in rng.sample(parts, cp)]
    kv = rng.choice(("sharded", "last"))
    return {"kv": kv, "partition": partition, "chunk_tokens": rng.choice((1, 3, 16, 64, 1024))}


def draw_offload(rng: Random) -> dict[str, Any]:
    """Section ``offload``; a slow link makes recomputation and the host's attention pay."""
    page = rng.choice((4, 8, 16))
    offload: dict[str, Any] = {
        "enabled": True,
        "method": rng.choice((AUTO, *METHODS)),
        "weights": rng.random() < 0.3,
        "num_gpu_batches": rng.choice((1, 1, 2, 3)),
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
        offload |= {"disk_gb": 0.05, "disk_io": rng.choice(("files", "auto"))}
        if not offload["weights"]:
            offload["host_gb"] = rng.choice((8, 24)) * page / (1 << 20)
    return offload
