"""MegaKV: long-context inference for Hugging Face causal language models on DeepSpeed."""

from megakv.config import MegaKVConfig
from megakv.engine import MegaKVEngine
from megakv.groups import stop_distributed
from megakv.initialization import init_inference

__all__ = ["MegaKVConfig", "MegaKVEngine", "init_inference", "stop_distributed"]
