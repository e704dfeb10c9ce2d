"""From a model's name to a module that holds only this rank's weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
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
from megakv.weights.fingerprint import module_digests, plain_parts
from megakv.weights.folder import local_directory, model_class, read_config, read_generation_config
from megakv.weights.formats import AS_STORED, LoadRequest, WeightFormat, choose_format
from megakv.weights.placement import WHOLE, HeadMap, SliceSpec, contiguous_head_map, head_counts, plan_placement
from megakv.weights.placement.plan import InjectionPolicy
from megakv.weights.quantised import PLAIN, keep_quantised, quantised_by, stored_tensors
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
    form: str
    """The format of the weights (`megakv.weights.formats`)."""
    bytes_by_type: dict[str, int]
    """Bytes of parameters and buffers on this rank by how numbers are stored: a type of torch, or of GGUF's blocks."""
    contents: dict[str, str]
    """What decides the values of all weights, by name; the files of a checkpoint come on top."""
    layer_weights: LayerWeights | None = None
    """Those of the decoder layers, where they lie off the accelerator; the module's parameters have no memory then."""

    @property
    def bytes_kept(self) -> int:
        """Bytes of parameters and buffers on this rank."""
        return sum(self.bytes_by_type.values())


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The text part of a model without memory: parameters on the meta device, buffers (rotary frequencies) real on the
    CPU.

    A model that transformers does not know or that MegaKV cannot serve is a `ValueError`.
    """
    family = model_class(config)
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = family._from_config(config, dtype=dtype)
    except RuntimeError as error:  # each parameter is asked of the memory, though not used, before it is made empty
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"a model of type {config.model_type!r} has no sizes by its config that fit: {reason}"
        ) from error
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
    weights: str = AS_STORED,
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
    where None. `weights` is ``megakv.weights.format`` (`megakv.weights.formats`). `head_map` says which heads live on
    which rank, or tells it from the model's config; contiguous runs by default. `injection_policy` is as in
    `plan_placement`. `all_reduce` sums a tensor over the tensor-parallel ranks and returns the sum. `offload` says
    whether the weights of decoder layers are to lie in host memory or on disk. `adapter` is the folder of one that is
    merged into a checkpoint's weights. `progress`, for one rank, shows a progress bar, and says so when the checkpoint
    holds more than the model takes.
    """
    device = torch.device(device)
    request = LoadRequest(device, dtype, tp_size, offloaded=offload is not None and bool(offload.weights))
    directory: Path | None = None
    if isinstance(model_or_path, nn.Module):
        if not isinstance(model_or_path, PreTrainedModel):
            hint = "; give its merge_and_unload()" if hasattr(model_or_path, "merge_and_unload") else ""
            kind = type(model_or_path).__name__
            raise ValueError(f"model is a {kind}, not a transformers PreTrainedModel or a path{hint}")
        model = model_or_path
        form = choose_format(weights)
        form.check(request, model.config)
        check_support(type(model), model.config)
        if (how := quantised_by(model)) is not None:
            keep_quantised(model, how, request, weights)
        dtype = dtype or model.dtype
    else:
        directory = local_directory(model_or_path, weights=load == "checkpoint")
        config = read_config(directory)
        form = choose_format(weights, directory if load == "checkpoint" else None, config)
        form.check(request, config)
        if adapter is not None and form.quantised is not None:
            raise ValueError(
                f"megakv.adapter = {str(adapter)!r} is merged into plain weights, and {directory} holds quantised ones "
                f"({form.quantised}): give the checkpoint in 16 bits; megakv.weights.format quantises what was merged"
            )
        dtype = dtype or config.get_text_config().dtype or torch.float32
        model = empty_model(config, dtype)
        model.generation_config = read_generation_config(directory)
    form.replace(model)
    heads = head_map(model.config) if callable(head_map) else head_map
    heads = heads or contiguous_head_map(*head_counts(model.config), tp_size)
    placement = plan_placement(model, heads, tp_rank, injection_policy, form.multiples)
    form.check_cut(placement, tp_size)
    dtypes = parameter_dtypes(model, dtype)
    source: WeightSource
    contents = {"type": str(dtype)} | form.contents(tp_size)
    if directory is None:
        source = ModuleWeights(model)
        contents |= module_digests(model)
    elif load == "random":
        source = RandomWeights(model, seed, device)
        contents |= {"values": f"megakv.seed {seed} of torch {torch.__version__} on {device.type}"}
    else:
        source = stored = form.source(directory, model)
        if (found := stored.unexpected) and progress:
            logger.warning("%s: %d stored tensors are not needed, %s first", directory, len(found), found[0])
        for note in form.notes if progress else ():
            logger.warning("%s", note)
        if adapter is not None:
            from megakv.weights.adapter import AdapterWeights

            source = changed = AdapterWeights(stored, adapter, model, dtypes, stored.unexpected)
            contents |= {"adapter": changed.config.contents()}
    if tp_size > 1 or form.at_load:
        setting = f"tensor_parallel.tp_size = {tp_size}" if tp_size > 1 else f"megakv.weights.format = {weights!r}"
        setattr(model, SPENT_ATTRIBUTE, setting)
    shard_structure(model, placement, heads, tp_rank, all_reduce)
    kept = dtypes | form.prepare(model, dtype)
    away: LayerWeights | None = None
    if offload is not None and offload.weights:
        from megakv.offload.weights import LayerWeights

        away = LayerWeights(model, kept, offload, pin=device.type == "cuda")
    _materialise(model, source, placement, form, dtypes, kept, device, away, progress=progress)
    form.finish(model)
    if away is not None:
        away.withdraw(model, device)
    model.eval()
    held = _bytes_by_type(model)
    return LoadedModel(model, heads, placement, source.bytes_read, form.name, held, contents, away)


def _bytes_by_type(model: nn.Module) -> dict[str, int]:
    """Bytes of all tensors by how their numbers are stored, the most first; what modules share counts once."""
    found: dict[str, int] = {}
    seen = set[int]()
    for module in model.modules():
        kinds = getattr(vars(module).get("forward"), "kinds", {})
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            for part in plain_parts(tensor):
                kind = kinds.get(name, getattr(module, "kind", None)) if part.dtype == torch.uint8 else None
                kind = kind or str(part.dtype).removeprefix("torch.")
                found[kind] = found.get(kind, 0) + part.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _materialise(
    model: PreTrainedModel,
    source: WeightSource,
    placement: dict[str, SliceSpec],
    form: WeightFormat,
    dtypes: dict[str, torch.dtype],
    kept: dict[str, torch.dtype],
    device: torch.device,
    away: LayerWeights | None,
    *,
    progress: bool,
) -> None:
    """Fill a model's parameters, of local shapes, from a source, one at a time, and move its buffers.

    Tied ones stay so, and a source's own parameters that are used where they lie, or are no plain tensors, stay what
    they are. `dtypes` are those
    that weights are read in, `kept` those of what is kept; they differ where the format makes others as they come.
    """

    def local(name: str, shape: torch.Size, home: Tensor | None = None) -> Tensor:
        """This rank's part in memory of its own, or in the very memory of the source where that has given it."""
        spec, dtype = placement.get(name, WHOLE), kept[name]
        if spec.zero:
            return torch.zeros(shape, dtype=dtype, device=device) if home is None else home.zero_()
        value = source.read(name, spec)
        if source.owned and type(value) not in PLAIN:
            return value
        if home is None and source.owned and spec.ranges is None and (value.dtype, value.device) == (dtype, device):
            return value
        return (torch.empty(shape, dtype=dtype, device=device) if home is None else home).copy_(value)

    names: dict[int, list[str]] = {}
    parameters = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in dtypes}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    total = sum(parameters[tied[0]].numel() * kept[tied[0]].itemsize for tied in names.values())
    with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for tied in names.values():
            first = tied[0]
            stored = next((name for name in tied if source.has(name)), first)
            empty, owners = parameters[first], [get_module_from_name(model, name) for name in tied]
            keys = form.made.get(first, (first,))
            rooms = [None if away is None else away.room(key) for key in keys]
            if first in form.made:
                part = source.read(stored, placement.get(stored, WHOLE)).to(device, dtypes[stored])
                form.make(owners, part, rooms)
            else:
                part = local(stored, empty.shape, rooms[0])
                filled = part if isinstance(part, nn.Parameter) else nn.Parameter(part, requires_grad=False)
                filled.requires_grad = False
                for module, leaf in owners:
                    setattr(module, leaf, filled)
                del filled
            bar.update(empty.numel() * kept[first].itemsize)
            for key, room in zip(keys, rooms, strict=True):
                if away is not None and room is not None:
                    model.get_parameter(key).data = away.put(key, room)
            # What was made into something else, or written to disk, goes before the next is read.
            del part, rooms, room
    for name, buffer in model.named_buffers():
        module, leaf = get_module_from_name(model, name)
        stored_too = name in dtypes and source.has(name)
        module._buffers[leaf] = local(name, buffer.shape) if stored_too else buffer.to(device)
