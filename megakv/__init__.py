"""MegaKV: long-context inference for Hugging Face causal language models on DeepSpeed.

Names are imported when they are used: ``megakv --help`` must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megakv.version import __version__

if TYPE_CHECKING:
    from megakv.base.errors import MegaKVError, PeerLostError
    from megakv.distributed.mesh import stop_distributed
    from megakv.engine.build import init_inference
    from megakv.engine.config import MegaKVConfig
    from megakv.engine.engine import MegaKVEngine
    from megakv.engine.extensions import (
        register_compression_method,
        register_offload_method,
        register_policy,
        register_prefill_method,
        register_weight_format,
    )

__all__ = [
    "MegaKVConfig",
    "MegaKVEngine",
    "MegaKVError",
    "PeerLostError",
    "__version__",
    "init_inference",
    "register_compression_method",
    "register_offload_method",
    "register_policy",
    "register_prefill_method",
    "register_weight_format",
    "stop_distributed",
]

_HOMES = {
    "MegaKVConfig": "engine.config",
    "MegaKVEngine": "engine.engine",
    "MegaKVError": "base.errors",
    "PeerLostError": "base.errors",
    "init_inference": "engine.build",
    "register_compression_method": "engine.extensions",
    "register_offload_method": "engine.extensions",
    "register_policy": "engine.extensions",
    "register_prefill_method": "engine.extensions",
    "register_weight_format": "engine.extensions",
    "stop_distributed": "distributed.mesh",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megakv.{_HOMES[name]}"), name)
