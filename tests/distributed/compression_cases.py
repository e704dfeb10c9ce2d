"""Ways to compress that tests of several ranks walk, and which of them a run takes."""

import random
from typing import Any

PEAK = {"observe": "prompt", "reduce": "peak"}
CASES: dict[str, dict[str, Any]] = {
    "streaming_llm": {"method": "streaming_llm", "budget": 0.3},
    "snapkv": {"method": "snapkv", "budget": 40, "window": 8},
    "snapkv_peak": {"method": "snapkv", "budget": 0.3, "window": 8, **PEAK},
    "pyramidkv": {"method": "pyramidkv", "budget": 0.3, "window": 8},
    "h2o": {"method": "h2o", "budget": 0.3},
    "ada_snapkv": {"method": "ada_snapkv", "budget": 0.3, "window": 8},
    "ada_snapkv_peak": {"method": "ada_snapkv", "budget": 0.3, "window": 8, "pool": 1, **PEAK},
    "headkv": {"method": "headkv", "budget": 0.3, "window": 8},
}
SPREAD = ("streaming_llm", "snapkv", "ada_snapkv", "ada_snapkv_peak")
"""Cases of meshes with a prefill method of their own: no score, local ones, and pools over heads."""
WHOLE_CUT = ("mistral", "gemma2")
"""Families whose caches are kept whole on all meshes: windows, and soft caps."""
WHOLE = ("gpt_oss", "bloom", "deepseek_v3")
"""Without tensor parallelism: sinks, ALiBi, and values of other dimensions than keys."""


def some_cases(always: tuple[str, ...], drawn: int, *, full: bool) -> str:
    """These cases and so many others at random, as ranks take them; or all."""
    others = [name for name in CASES if name not in always]
    return ",".join([*always, *(others if full else random.sample(others, drawn))])
