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
