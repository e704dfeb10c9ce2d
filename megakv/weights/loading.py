"""From a model's name to a module that holds only this rank's weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from megakv.errors import MegaKVError
from megakv.injection.ownership import SPENT_ATTRIBUTE
from megakv.injection.support import check_support
from megakv.offload.weights import HostWeights
from megakv.weights import CheckpointWeights, ModuleWeights, RandomWeights, WeightSource
from megakv.weights.files import local_directory
from megakv.weights.fp8 import check_device, use_fp8
from megakv.weights.materialisation import materialise
from megakv.weights.placement import (
    HeadMap,
    SliceSpec,
    contiguous_head_map,
    head_counts,
    plan_placement,
)
from megakv.weights.tensor_parallel import AllReduce, shard_structure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model with one rank's weights.

    Parameters
    ----------
    module : PreTrainedModel
        In evaluation mode, without gradients.
    config : PreTrainedConfig
        The whole model's.
    head_map : HeadMap
        Which heads are where.
    placement : dict
        The part kept of each parameter of the whole model, by name.
    bytes_read : int
        Bytes read from the checkpoint by this rank.
    bytes_kept : int
        Bytes of parameters and buffers on this rank.
    host_weights : HostWeights, optional
        Those of the decoder layers, where they lie in host memory; the module's parameters have none then.
    """

    module: PreTrainedModel
    config: PreTrainedConfig
    head_map: HeadMap
    placement: dict[str, SliceSpec]
    bytes_read: int
    bytes_kept: int
    host_weights: HostWeights | None = None


def read_config(directory: Path) -> PreTrainedConfig:
    """The config of a checkpoint directory.

    Raises
    ------
    MegaKVError
        If there is none, or none that this transformers knows.
    """
    if not (directory / "config.json").is_file():
        raise MegaKVError(f"{directory} has no config.json, so it is no Hugging Face model")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise MegaKVError(f"{directory / 'config.json'} describes no model that transformers knows: {error}") from error


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model without memory: parameters on the meta device, buffers (rotary frequencies) real on the CPU.

    Raises
    ------
    ValueError
        If transformers has no causal language model for this config, the config asks for quantised weights, or MegaKV
        cannot serve the model.
    """
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = (
            quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", "")
        )
        raise ValueError(
            f"model type {config.model_type!r} with quantization_config ({method}) is not supported: MegaKV computes "
            "with unquantised weights; use a checkpoint in bfloat16, float16 or float32"
        )
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    check_support(type(model), config)
    model.tie_weights()
    _renew_tables(model, model)
    return model


def _renew_tables(module: nn.Module, owner: PreTrainedModel) -> None:
    """Tables made under a half-precision default are rounded; transformers' own loading makes them again, as here."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    if module._non_persistent_buffers_set:
        owner._init_weights(module)
    for child in module.children():
        _renew_tables(child, owner)


def parameter_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type of each parameter and persistent buffer: `dtype`, but what transformers keeps in float32 stays so."""
    in_float32 = [re.escape(name).replace(r"\*", ".*") for name in model._get_dtype_plan(dtype)]
    kept = re.compile("|".join(in_float32)) if in_float32 else None
    main = model.dtype
    types = {}
    for name, tensor in model.state_dict().items():
        types[name] = dtype if tensor.dtype == main else tensor.dtype
        if kept is not None and kept.search(name):
            types[name] = torch.float32
    return types


def _bytes_kept(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _load_generation_config(model: PreTrainedModel, directory: Path) -> None:
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)


def build_model(
    model_or_path: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None,
    load: Literal["checkpoint", "random"] = "checkpoint",
    feed_forward: Literal["dtype", "fp8"] = "dtype",
    tp_rank: int = 0,
    tp_size: int = 1,
    head_map: HeadMap | Callable[[PreTrainedConfig], HeadMap | None] | None = None,
    all_reduce: AllReduce,
    device: torch.device | str = "cpu",
    seed: int = 0,
    host_bytes: int | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Load this rank's share of a causal language model; no more than one parameter beyond it is ever in memory.

    Parameters
    ----------
    model_or_path : path, hub id or PreTrainedModel
        A model given as a module is sharded in place; its weights are freed as they are cut.
    dtype : torch.dtype, optional
        Of the weights; what the config or the module given says where None.
    load : {"checkpoint", "random"}
        Whether values come from safetensors, or from `seed` (only config.json is needed then). Ignored for a module.
    feed_forward : {"dtype", "fp8"}
        Whether the weights of feed-forward layers stay in `dtype`, or become row-wise FP8 (`megakv.weights.fp8`).
    head_map : HeadMap or callable, optional
        Which heads live on which rank, or what tells it from the model's config; contiguous runs by default.
    all_reduce : callable
        Sums a tensor over the tensor-parallel ranks and returns the sum.
    seed : int
        Of random weights.
    host_bytes : int, optional
        Where the weights of decoder layers are to lie in host memory: how much there is of it.
    progress : bool
        Whether to show a progress bar, and say so when the checkpoint holds more than the model takes; for one rank.

    Returns
    -------
    LoadedModel

    Raises
    ------
    ValueError
        If the model cannot be split or quantised as asked, or is of a kind that is not supported.
    MegaKVError
        If the checkpoint is missing, broken, or of another model.
    """
    device = torch.device(device)
    if feed_forward == "fp8":
        check_device(device)
    directory: Path | None = None
    if isinstance(model_or_path, nn.Module):
        if not isinstance(model_or_path, PreTrainedModel):
            raise ValueError(f"model is a {type(model_or_path).__name__}, not a transformers PreTrainedModel or a path")
        model = model_or_path
        check_support(type(model), model.config)
        dtype = dtype or model.dtype
    else:
        directory = local_directory(model_or_path, weights=load == "checkpoint")
        config = read_config(directory)
        dtype = dtype or config.get_text_config().dtype or torch.float32
        model = empty_model(config, dtype)
    heads = _checked_map(model.config, head_map(model.config) if callable(head_map) else head_map, tp_rank, tp_size)
    placement = plan_placement(model, heads, tp_rank)
    dtypes = parameter_dtypes(model, dtype)
    source: WeightSource
    if directory is None:
        source = ModuleWeights(model)
    elif load == "random":
        source = RandomWeights(model, seed, device)
    else:
        source = _open_checkpoint(directory, model, progress=progress)
    if tp_size > 1 or feed_forward == "fp8":
        setting = f"tensor_parallel.tp_size = {tp_size}" if tp_size > 1 else "megakv.feed_forward = 'fp8'"
        setattr(model, SPENT_ATTRIBUTE, setting)
    shard_structure(model, placement, heads, tp_rank, all_reduce)
    if feed_forward == "fp8":
        use_fp8(model)
    host = None
    if host_bytes is not None:
        host = HostWeights(model, dtypes, budget=host_bytes, pin=device.type == "cuda")
    materialise(model, source, placement, dtypes, device, host=host, progress=progress)
    if host is not None:
        host.withdraw(model, device)
    if directory is not None:
        _load_generation_config(model, directory)
    model.eval()
    return LoadedModel(model, model.config, heads, placement, source.bytes_read, _bytes_kept(model), host)


def _open_checkpoint(directory: Path, model: PreTrainedModel, *, progress: bool) -> CheckpointWeights:
    checkpoint = CheckpointWeights(directory, model)
    found = checkpoint.unexpected
    if found and progress:
        logger.warning("%s: %d stored tensors are of no use here, %s first", directory, len(found), found[0])
    return checkpoint


def _checked_map(config: PreTrainedConfig, head_map: HeadMap | None, tp_rank: int, tp_size: int) -> HeadMap:
    layers, heads, kv_heads = head_counts(config)
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank = {tp_rank} is not below tensor_parallel.tp_size = {tp_size}")
    if head_map is None:
        return contiguous_head_map(layers, heads, kv_heads, tp_size)
    found = (len(head_map.layers), head_map.n_heads, head_map.n_kv_heads, head_map.tp_size)
    if found != (layers, heads, kv_heads, tp_size):
        raise ValueError(
            f"head map is for (layers, query heads, KV heads, ranks) = {found}, the model and tensor_parallel.tp_size "
            f"need {(layers, heads, kv_heads, tp_size)}"
        )
    return head_map
