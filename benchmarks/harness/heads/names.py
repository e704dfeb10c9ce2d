"""Ways to place KV heads that the FairKV benchmarks compare, and their common options. Nothing heavy is imported."""

from __future__ import annotations

from typing import Any

from ..options import DTYPES, Options

UNIFORM, CONTIGUOUS = "uniform", "contiguous"
MAPPED = ("nodp", *(f"{kind}{copies}" for kind in ("dp", "split") for copies in (1, 2, 3, 4)))
HEAD_METHODS = (UNIFORM, CONTIGUOUS, *MAPPED)
"""`uniform`: equal budgets. The others share one skewed profile: the paper's static head allocation, its best-effort
assignment, fair-copying with so many copied heads, and copies that divide a head's tokens."""
CHOSEN = "time"
BY_TOKENS = ("nodp", "split1")
"""Beside what the cost model chooses: mappings that balance tokens, without copies, and with one that shares them."""


def kept_heads(options: Options, *, group: Any, head_dim: Any = 128, dtype: Any = "bf16") -> None:
    """The KV heads of a layer, which keep unequal numbers of tokens."""
    options.add("--sigma", 0.8, "of the heads' log-normal budgets")
    options.add("--seed", 222, "of the budgets", least=0)
    options.add("--kv-heads", 8, "KV heads of a layer")
    options.add("--group", group, "query heads to a KV head")
    options.add("--head-dim", head_dim, "head dimension")
    options.choice("--dtype", DTYPES, dtype, "of queries, keys, values")
