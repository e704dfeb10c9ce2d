"""From a model's name to a module that holds only this rank's weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.quantizers.quantizers_utils import get_module_from_name

from megakv.injection.ownership import SPENT_ATTRIBUTE
from megakv.injection.support import check_support
from megakv.offload.config import OffloadConfig
from megakv.weights.adapter import AdapterWeights
from megakv.weights.checkpoint import CheckpointWeights
from megakv.weights.fingerprint import module_digests, plain_parts
from megakv.weights.folder import local_directory, model_class, read_config, read_generation_config
from megakv.weights.fp8 import SCALE, check_device, quantise, use_fp8
from megakv.weights.placement import WHOLE, HeadMap, SliceSpec, contiguous_head_map, head_counts, plan_placement
from megakv.weights.placement.plan import InjectionPolicy
from megakv.weights.quantised import keep_quantised, quantised_by, stored_tensors
from megakv.weights.sources import ModuleWeights, RandomWeights, WeightSource
from megakv.weights.tensor_parallel import AllReduce, shard_structure
from megakv.weights.text_part import leave_other_senses

if TYPE_CHECKING:
    from megakv.offload.weights import LayerWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model with one rank's weights, in evaluation mode, without gradients."""

    module: PreTrainedModel
    head_map: HeadMap
    placement: dict[str, SliceSpec]
    """The part kept of each parameter of the whole model, by name."""
    bytes_read: int
    """Bytes of the checkpoint that this rank has read."""
    bytes_kept: int
    """Bytes of parameters and buffers on this rank."""
    contents: dict[str, str]
    """What decides the values of all weights, by name; the files of a checkpoint come on top."""
    layer_weights: LayerWeights | None = None
    """Those of the decoder layers, where they lie off the accelerator; the module's parameters have no memory then."""


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The text part of a model without memory: parameters on the meta device, buffers (rotary frequencies) real on the
    CPU.

    A model that transformers does not know, that is quantised or that MegaKV cannot serve is a `ValueError`.
    """
    configs = (config, config.get_text_config())
    quantised = next((found for each in configs if (found := getattr(each, "quantization_config", None))), None)
    if quantised is not None:
        method = (quantised if isinstance(quantised, dict) else vars(quantised)).get("quant_method", "")
        raise ValueError(
            f"model type {config.model_type!r} with quantization_config ({method}) is not supported: MegaKV computes "
            "with unquantised weights; use a checkpoint in bfloat16, float16 or float32"
        )
    family = model_class(config)
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = family._from_config(config, dtype=dtype)
    check_support(family, config)
    model.tie_weights()
    _renew_tables(model, model)
    leave_other_senses(model)
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
    in_float32 = "|".join(re.escape(name).replace(r"\*", ".*") for name in model._get_dtype_plan(dtype))
    types = {}
    for name, tensor in stored_tensors(model).items():
        kept = in_float32 and re.search(in_float32, name)
        types[name] = torch.float32 if kept else dtype if tensor.dtype == model.dtype else tensor.dtype
    return types


def build_model(
    model_or_path: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None,
    load: Literal["checkpoint", "random"] = "checkpoint",
    feed_forward: Literal["dtype", "fp8"] = "dtype",
    tp_rank: int = 0,
    tp_size: int = 1,
    head_map: HeadMap | Callable[[PreTrainedConfig], HeadMap | None] | None = None,
    injection_policy: InjectionPolicy | None = None,
    all_reduce: AllReduce,
    device: torch.device | str = "cpu",
    seed: int = 0,
    offload: OffloadConfig | None = None,
    adapter: Path | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Load this rank's share of a causal language model; no more than one parameter beyond it is ever in memory.

    A model that is given is sharded in place; its weights are freed as they are cut. Of a path or hub id with `load`
    ``random``, only config.json is read, and values come from `seed`. `dtype` is what the config or the module says
    where None; with `feed_forward` ``fp8`` the weights of feed-forward layers become row-wise FP8
    (`megakv.weights.fp8`). `head_map` says which heads live on which rank, or tells it from the model's config;
    contiguous runs by default. `injection_policy` is as in `plan_placement`. `all_reduce` sums a tensor over the
    tensor-parallel ranks and returns the sum. `offload` says whether the weights of decoder layers are to lie in host
    memory or on disk. `adapter` is the folder of one that is merged into a checkpoint's weights. `progress`, for one
    rank, shows a progress bar, and says so when the checkpoint holds more than the model takes.
    """
    device = torch.device(device)
    if feed_forward == "fp8":
        check_device(device)
    directory: Path | None = None
    if isinstance(model_or_path, nn.Module):
        if not isinstance(model_or_path, PreTrainedModel):
            hint = "; give its merge_and_unload()" if hasattr(model_or_path, "merge_and_unload") else ""
            kind = type(model_or_path).__name__
            raise ValueError(f"model is a {kind}, not a transformers PreTrainedModel or a path{hint}")
        model = model_or_path
        check_support(type(model), model.config)
        if (how := quantised_by(model)) is not None:
            settings = {"fp8": feed_forward == "fp8", "offloaded": offload is not None and bool(offload.weights)}
            keep_quantised(model, how, dtype=dtype, tp_size=tp_size, device=device, **settings)
        dtype = dtype or model.dtype
    else:
        directory = local_directory(model_or_path, weights=load == "checkpoint")
        config = read_config(directory)
        dtype = dtype or config.get_text_config().dtype or torch.float32
        model = empty_model(config, dtype)
        model.generation_config = read_generation_config(directory)
    heads = head_map(model.config) if callable(head_map) else head_map
    heads = heads or contiguous_head_map(*head_counts(model.config), tp_size)
    placement = plan_placement(model, heads, tp_rank, injection_policy)
    dtypes = parameter_dtypes(model, dtype)
    source: WeightSource
    # Ranks quantise their own parts of a row: other parts are other weights.
    contents = {"type": str(dtype), "feed-forward": f"fp8 by {tp_size}" if feed_forward == "fp8" else str(dtype)}
    if directory is None:
        source = ModuleWeights(model)
        contents |= module_digests(model)
    elif load == "random":
        source = RandomWeights(model, seed, device)
        contents |= {"values": f"megakv.seed {seed} of torch {torch.__version__} on {device.type}"}
    else:
        source = checkpoint = CheckpointWeights(directory, model)
        if (found := checkpoint.unexpected) and progress:
            logger.warning("%s: %d stored tensors are not needed, %s first", directory, len(found), found[0])
        if adapter is not None:
            source = changed = AdapterWeights(checkpoint, adapter, model, dtypes, checkpoint.unexpected)
            contents |= {"adapter": changed.config.contents()}
    if tp_size > 1 or feed_forward == "fp8":
        setting = f"tensor_parallel.tp_size = {tp_size}" if tp_size > 1 else "megakv.feed_forward = 'fp8'"
        setattr(model, SPENT_ATTRIBUTE, setting)
    shard_structure(model, placement, heads, tp_rank, all_reduce)
    fp8 = use_fp8(model) if feed_forward == "fp8" else {}
    away: LayerWeights | None = None
    if offload is not None and offload.weights:
        from megakv.offload.weights import LayerWeights

        away = LayerWeights(model, dtypes | fp8, offload, pin=device.type == "cuda")
    _materialise(model, source, placement, dtypes, device, away, fp8, progress=progress)
    if away is not None:
        away.withdraw(model, device)
    model.eval()
    tensors = (part for tensor in (*model.parameters(), *model.buffers()) for part in plain_parts(tensor))
    kept = sum(tensor.nbytes for tensor in tensors)
    return LoadedModel(model, heads, placement, source.bytes_read, kept, contents, away)


def _materialise(
    model: PreTrainedModel,
    source: WeightSource,
    placement: dict[str, SliceSpec],
    dtypes: dict[str, torch.dtype],
    device: torch.device,
    away: LayerWeights | None,
    fp8: Collection[str],
    *,
    progress: bool,
) -> None:
    """Fill a model's parameters, of local shapes, from a source, one at a time, and move its buffers.

    Tied ones stay so, and a source's own parameters that are used where they lie stay what they are. `dtypes` are those
    of all but scales: weights that become `fp8` are read in theirs, and quantised as they come.
    """

    def local(name: str, shape: torch.Size, home: Tensor | None = None) -> Tensor:
        """This rank's part in memory of its own, or in the very memory of the source where that has given it."""
        spec, dtype = placement.get(name, WHOLE), dtypes[name]
        if spec.zero:
            return torch.zeros(shape, dtype=dtype, device=device) if home is None else home.zero_()
        value = source.read(name, spec)
        if home is None and source.owned and spec.ranges is None and (value.dtype, value.device) == (dtype, device):
            return value
        return (torch.empty(shape, dtype=dtype, device=device) if home is None else home).copy_(value)

    names: dict[int, list[str]] = {}
    parameters = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in dtypes}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    total = sum(parameters[tied[0]].numel() * dtypes[tied[0]].itemsize for tied in names.values())
    with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for tied in names.values():
            stored = next((name for name in tied if source.has(name)), tied[0])
            empty = parameters[tied[0]]
            keys = [tied[0], tied[0] + SCALE] if tied[0] in fp8 else [tied[0]]
            rooms = [None if away is None else away.room(key) for key in keys]
            if tied[0] in fp8:
                part = source.read(stored, placement.get(stored, WHOLE)).to(device, dtypes[stored])
                module, leaf = get_module_from_name(model, tied[0])
                quantise(module, leaf, part, rooms)
            else:
                part = local(stored, empty.shape, rooms[0])
                filled = part if isinstance(part, nn.Parameter) else nn.Parameter(part, requires_grad=False)
                filled.requires_grad = False
                for name in tied:
                    module, leaf = get_module_from_name(model, name)
                    setattr(module, leaf, filled)
                del filled
            bar.update(empty.numel() * dtypes[tied[0]].itemsize)
            for key, room in zip(keys, rooms, strict=True):
                if away is not None and room is not None:
                    model.get_parameter(key).data = away.put(key, room)
            # What was quantised, or written to disk, goes before the next is read.
            del part, rooms, room
    for name, buffer in model.named_buffers():
        module, leaf = get_module_from_name(model, name)
        stored_too = name in dtypes and source.has(name)
        module._buffers[leaf] = local(name, buffer.shape) if stored_too else buffer.to(device)
