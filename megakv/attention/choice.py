"""Which method serves a pass: the one place where `auto` is decided."""

from __future__ import annotations

from collections.abc import Callable

from megakv.attention.all_gather import AllGatherKV
from megakv.attention.method import AttentionMethod
from megakv.attention.pass_kv import PassKV
from megakv.attention.pass_q import PassQ
from megakv.attention.replicated import Replicated

METHODS: dict[str, Callable[[], AttentionMethod]] = {
    "pass_kv": PassKV,
    "pass_q": PassQ,
    "all_gather": AllGatherKV,
    "replicated": Replicated,
}
PREFILL = ("pass_kv", "pass_q", "all_gather")
DECODE = ("pass_q", "replicated")


def choose_prefill(setting: str, *, new: int, cached: int, heads: int, kv_heads: int) -> str:
    """The prefill method for `new` tokens on top of `cached` ones.

    ``auto`` sends the smaller message: queries are smaller than keys and values exactly when the miss rate
    T / (T + P) is below 2 N_KV / N_H (context parallelism, Equation 1).
    """
    if setting != "auto":
        return setting
    return "pass_q" if new * heads < 2 * kv_heads * (new + cached) else "pass_kv"


def choose_decode(setting: str, *, batch: int, size: int) -> str:
    """The decode method for a batch.

    ``auto`` replicates the queries while there are fewer sequences than ranks: sharding them would leave ranks idle.
    """
    if setting != "auto":
        return setting
    return "replicated" if batch < size else "pass_q"
