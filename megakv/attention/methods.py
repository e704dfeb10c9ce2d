"""The registry of attention methods: a method is one file, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megakv.attention.all_gather import AllGatherKV
from megakv.attention.method import AttentionMethod
from megakv.attention.pass_kv import PassKV
from megakv.attention.pass_q import PassQ
from megakv.attention.replicated import Local, Replicated
from megakv.attention.runahead import Runahead
from megakv.attention.tsp import TSP
from megakv.base.registry import Registry


@dataclass(frozen=True)
class MethodEntry:
    """What there is to know of a method beside its code."""

    make: Callable[[], AttentionMethod]
    prefill: bool = False  # Whether the JSON may ask for it for prompts.
    decode: bool = False  # Whether the JSON may ask for it for newly generated tokens.
    contiguous: bool = False  # Whether its ranks compute consecutive tokens, instead of balanced chunks.
    keys_stay: bool = False  # Whether no cached key and value leaves its rank.
    replicated: bool = False  # Whether every rank has the queries of all new tokens.
    slices_linears: bool = False  # Whether each rank computes its slice of the model's linears, for all of them.
    narrows: bool = False  # Whether, in a last layer that few queries are wanted of, these may travel, not all keys.


METHODS: Registry[MethodEntry] = Registry(
    "attention method",
    {
        "pass_kv": MethodEntry(PassKV, prefill=True, narrows=True),
        "pass_q": MethodEntry(PassQ, prefill=True, decode=True, keys_stay=True, narrows=True),
        "all_gather": MethodEntry(AllGatherKV, prefill=True),
        "replicated": MethodEntry(Replicated, decode=True, keys_stay=True, replicated=True),
        "tensor": MethodEntry(Replicated, decode=True, keys_stay=True, replicated=True, slices_linears=True),
        "local": MethodEntry(Local, keys_stay=True),
        "runahead": MethodEntry(Runahead, prefill=True, contiguous=True, narrows=True),
        "tsp": MethodEntry(TSP, prefill=True, contiguous=True),
        "tsp_causal": MethodEntry(AllGatherKV, prefill=True, contiguous=True),
    },
)


def prefill_methods() -> tuple[str, ...]:
    """What the JSON may ask for beside ``auto``, for prompts."""
    return tuple(name for name, entry in METHODS.items() if entry.prefill)


def decode_methods() -> tuple[str, ...]:
    """The same for newly generated tokens."""
    return tuple(name for name, entry in METHODS.items() if entry.decode)


def is_contiguous(prefill: str) -> bool:
    """Whether ranks compute consecutive tokens of a prompt, by what the JSON asks for."""
    return prefill in METHODS and METHODS[prefill].contiguous
