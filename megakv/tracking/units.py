"""Numbers as people read them: times, sizes, rates and shares, by what a metric's name says of its unit."""

from __future__ import annotations

import math
import re

Cell = str | int | float | None

_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB")
_TITLES = {
    "cp_rank": "CP rank",
    "tp_rank": "TP rank",
    "kv_bytes": "KV cache",
    "kv_bits": "KV bits",
    "kv_bytes_max": "KV cache, largest rank's",
    "peak_bytes": "peak memory",
    "peak_bytes_max": "peak memory, largest rank's",
    "weight_bytes_max": "weights, largest rank's",
    "bytes_in": "to the accelerator",
    "bytes_out": "from the accelerator",
    "bytes_sent": "sent",
    "disk_bytes": "from disk",
    "disk_io": "disk I/O",
    "weight_bytes": "weights brought",
    "ttft_s": "TTFT",
    "ttit_s": "TTIT",
    "prompt_tokens_per_s": "prompt tokens per second",
    "token_s": "time per token",
    "kv_capacity": "KV capacity in tokens",
    "kv_tokens": "KV tokens",
    "at_s": "time",
    "seconds": "in flight",
    "seconds_hidden": "hidden",
    "seconds_exposed": "exposed",
    "seconds_exposed_max": "exposed, worst rank's",
    "ttft_predicted_s": "predicted TTFT",
    "on_host": "attended on the host",
    "on_host_share": "attended on the host, share",
    "error": "prediction error",
}
_BY_OPERATION = ("bytes_sent", "calls", "seconds_exposed_max", "ttft_predicted_s")


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1 or unit == "us":
            break
    return "0 s" if seconds == 0 else f"{_figures(seconds * scale)} {unit}"


def size(nbytes: float) -> str:
    """Bytes in the binary unit that suits them."""
    power = min(len(_PREFIXES) - 1, int(math.log2(abs(nbytes)) // 10)) if abs(nbytes) >= 1 else 0
    return f"{nbytes:,.0f} B" if not power else f"{_figures(nbytes / 1024**power)} {_PREFIXES[power]}"


def shown(name: str, value: Cell) -> str:
    """A value of the metric or column `name`."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name.endswith("tokens_per_s"):
        return f"{value:,.0f} tokens/s"
    if "bytes" in name:
        return size(value)
    if name.startswith("seconds") or re.search(r"_s(/|$)", name):
        return duration(value)
    if re.search(r"(utilisation|_rate|_share|error)(/|$)", name):
        return f"{value:.1%}"
    return f"{int(value):,}" if isinstance(value, int) or value.is_integer() else f"{value:.4g}"


def title(name: str) -> str:
    """The column or metric `name` in words; what it is of, an operation or a rank, keeps its own name."""
    family, *members = name.split("/")
    if family in _BY_OPERATION or len(members) > 1:
        return ": ".join([*map(_words, [family, *members][:-1]), members[-1]]) if members else _words(family)
    return ": ".join(map(_words, [family, *members]))


def _words(name: str) -> str:
    return _TITLES.get(name) or re.sub(r"_s$", "", name).replace("_", " ")


def _figures(value: float) -> str:
    """Three figures, but never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


TERMS = {
    "TTFT": "time to first token: from the start of the call until the first new token is known",
    "TTIT": "time to incremental token: mean time from one new token to the next",
    "CP": "context parallelism: ranks that share the tokens of a prompt",
    "TP": "tensor parallelism: ranks that share the heads and weights of each layer",
    "pass-KV": "ring attention in which keys and values travel from rank to rank, and queries stay ('pass_kv')",
    "pass-Q": "ring attention in which queries travel, and keys and values stay ('pass_q', 'pass_q_return')",
    "KV-Runahead": "a chain: a rank takes the keys and values of all tokens before its own from the rank before",
    "TSP": "tensor and sequence parallelism, the baseline of KV-Runahead: even parts and an all-gather",
    "replicated": "all ranks compute the new token and attend to their own keys; one gather merges the results",
    "compute": "what a rank computes, where events were recorded (megakv.tracking.timeline)",
    "hidden": "communication behind compute, which costs no time; transfers at the same time count each",
    "exposed": "communication in which a rank does nothing but wait",
    "simulated": "played through by the cost model, not run",
    "lossy": "tokens may differ from those of the plain model",
    "budget": "what part of a prompt's tokens, or how many of them, a KV head keeps on average",
    "busy rate": "time in attention over that of the slowest rank beside it, which it waits for",
    "utilisation": "mean load over the largest: 100% where no rank, or nothing of a link, stands idle",
    "recomputed": "tokens whose keys and values are made anew from activations: the split point",
    "on the host": "the host's processor attends to some keys and values where they lie",
    "hit rate": "prompt tokens found in the prefix store, of all prompt tokens of served requests",
    "tier": "where keys and values lie: on the device, in host memory, on disk",
}
"""What words of a page mean."""
