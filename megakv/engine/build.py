"""From a model and a JSON to an engine on every rank."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.attention.compiled import load_kernel
from megakv.attention.device_step import attends_on_device
from megakv.attention.layer import load_layer
from megakv.attention.linear import load_linear
from megakv.attention.prefill import load_prefill
from megakv.attention.step import load_step
from megakv.base.device import Clock, HostClock, settle_allocator, without_autograd
from megakv.base.errors import CombinationError, MegaKVError
from megakv.costmodel.shape import ModelShape
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
from megakv.distributed.failures import joining
from megakv.distributed.launchers import read_launch
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import check_same_settings, check_world, make_mesh, start_distributed
from megakv.engine.config import MegaKVConfig, MegaKVSection, load_config
from megakv.engine.engine import MegaKVEngine
from megakv.engine.generation import own_defaults
from megakv.engine.loading import LoadedModel, build_model
from megakv.fairkv.compression import Compressor
from megakv.fairkv.config import FairKVConfig
from megakv.forward.choice import serves_first_turns_only
from megakv.forward.planning import PassPlanner
from megakv.forward.runtime import Runtime
from megakv.injection.layer_kind import is_kind
from megakv.injection.ownership import check_unused, own_config
from megakv.tracking.tracker import check_files
from megakv.weights.adapter_config import WEIGHTS_FILE
from megakv.weights.file_digests import FileDigests
from megakv.weights.files import weight_files
from megakv.weights.folder import adapter_directory, local_directory, read_config
from megakv.weights.placement import HeadMap, head_counts, tensor_parallel_sizes

if TYPE_CHECKING:
    from megakv.fairkv.mapping import HeadMapping
    from megakv.fairkv.replicas import HeadReplicas

MAPPING = "megakv.fairkv.mapping"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

logger = logging.getLogger(__name__)


@without_autograd
def init_inference(
    model: str | Path | nn.Module,
    config: MegaKVConfig | dict[str, Any] | str | Path | None = None,
    **overrides: Any,
) -> MegaKVEngine:
    """Build an engine on every rank; also a context: ``with megakv.init_inference(...) as engine:`` destroys it.

    A directory or hub id is read straight into this rank's shards. With ``"load": "random"`` only its config is read. A
    `PreTrainedModel` is used, and sharded, in place; one engine at a time may have it. `config` is a DeepSpeed
    inference config with a ``megakv`` section, or the JSON file of one; `overrides` are further keys, as
    `deepspeed.init_inference` takes them.

    Raises
    ------
    ValueError
        If a setting is unknown or impossible: its key, its value and what is allowed.
    MegaKVError
        If a checkpoint is broken or a peer is lost.

    Notes
    -----
    Starts the process group through DeepSpeed unless it stands: of all ranks that deepspeed, torchrun, accelerate, srun
    or mpirun started, else of this process alone.
    Where no engine comes of it, all else that was begun is ended, on every rank.
    """
    if not isinstance(model, str | Path | nn.Module):
        raise ValueError(f"model = {model!r}: allowed: a directory, a hub id or a transformers PreTrainedModel")
    parsed = load_config(config, **overrides)
    cp_size, tp_size, section = parsed.cp_size, parsed.tp_size, parsed.megakv
    # Degrees that are refused below are not worth the minute that DeepSpeed's compiler takes.
    tp_only = cp_size == 1 and 1 < tp_size == read_launch().world_size and _may_split(model, parsed)
    start_distributed(tp_only=tp_only, timeout_s=section.timeout_s)
    with joining():
        check_same_settings(parsed.shared_settings())
    check_world(cp_size=cp_size, tp_size=tp_size, tp_sizes=partial(_tp_sizes, model))
    with ExitStack() as owned:
        with joining():
            mesh = make_mesh(cp_size=cp_size, tp_size=tp_size, timeout_s=section.timeout_s)
        comm = owned.enter_context(Communicator(mesh, Ledger(clock=_clock_of(mesh.device))))
        return _make_engine(model, parsed, comm, owned)


def _clock_of(device: torch.device) -> Clock:
    """Moments of what a device computes."""
    if device.type != "cuda":
        return HostClock()
    from megakv.offload.cuda_link import CudaStreams

    return CudaStreams(device)


def _place(model: str | Path | nn.Module, *, weights: bool) -> Path | nn.Module:
    return local_directory(model, weights=weights) if isinstance(model, str | Path) else model


def _adapter(model: str | Path | nn.Module, section: MegaKVSection) -> Path | None:
    """The folder of the adapter that is to be merged into a model's weights."""
    if isinstance(model, nn.Module):
        if section.adapter is not None:
            raise ValueError(
                f"megakv.adapter = {section.adapter!r} is for the folder of a model: merge it into a loaded one by "
                "peft's merge_and_unload()"
            )
        return None
    return adapter_directory(model, section.adapter) if section.load == "checkpoint" else None


def _config_of(model: str | Path | nn.Module) -> Any:
    return read_config(local_directory(model, weights=False)) if isinstance(model, str | Path) else model.config


def _tp_sizes(model: str | Path | nn.Module) -> list[int]:
    """The tensor-parallel degrees that split the model's heads."""
    _, heads, kv_heads = head_counts(_config_of(model))
    return tensor_parallel_sizes(heads, kv_heads)


def _may_split(model: str | Path | nn.Module, parsed: MegaKVConfig) -> bool:
    """Whether the tensor-parallel degree may split the model's heads, as far as can be seen before ranks meet."""
    try:
        return parsed.megakv.fairkv.mapping is not None or parsed.tp_size in _tp_sizes(model)
    except (ValueError, MegaKVError, AttributeError):
        # Whoever reads the model says what is wrong with it.
        return False


def _make_engine(
    model: str | Path | nn.Module, parsed: MegaKVConfig, comm: Communicator, owned: ExitStack
) -> MegaKVEngine:
    mesh, section, tp_size = comm.mesh, parsed.megakv, parsed.tp_size
    if mesh.device.type == "cpu":
        settle_allocator()
    if mesh.device.type == "cpu" or (section.offload.enabled and section.offload.host_attends):
        # Before the first token, which would wait for the compiler.
        made = load_kernel(), load_prefill(), load_linear(), load_step(), load_layer()
        reasons = [why for kernel, why in made if kernel is None]
        if reasons and mesh.rank == 0:
            logger.warning(
                "the processor computes through PyTorch's kernels, which are slower, because MegaKV's own cannot be "
                "had: %s (a C++ compiler that knows OpenMP is needed, c++ or the one in CXX)",
                reasons[0],
            )

    agreement = Agreement(comm)
    agreement.together(lambda: check_files(section.tracking) if mesh.rank == 0 else None)
    if parsed.enable_cuda_graph and not (mesh.device.type == "cuda" and attends_on_device()):
        raise CombinationError(
            "machine",
            "enable_cuda_graph = true: it needs a CUDA GPU and triton, which comes with PyTorch for CUDA; this rank "
            f"computes on {mesh.device}; leave it out",
        )
    mapping = _mapping(section.fairkv, tp_size, agreement)

    place = agreement.together(lambda: _place(model, weights=section.load == "checkpoint"))
    adapter = agreement.together(lambda: _adapter(model, section))
    stored = weight_files(place) if isinstance(place, Path) and section.load == "checkpoint" else {}
    if adapter is not None:
        stored |= {WEIGHTS_FILE: adapter / WEIGHTS_FILE}
    files = FileDigests(stored, agreement)
    owned.callback(files.close)

    def load() -> LoadedModel:
        if isinstance(model, PreTrainedModel):
            check_unused(model)
            owned.enter_context(own_config(model))
        loaded = build_model(
            place,
            dtype=parsed.dtype,
            load=section.load,
            weights=section.weights.format,
            tp_rank=mesh.tp_rank,
            tp_size=tp_size,
            head_map=partial(_head_map, model, parsed, mapping),
            injection_policy=parsed.injection_policy,
            all_reduce=partial(comm.all_reduce, over="tp", operation="tp_all_reduce", layer=None),
            device=mesh.device,
            seed=section.seed,
            offload=section.offload,
            adapter=adapter,
            progress=mesh.rank == 0,
        )
        if loaded.layer_weights is not None:
            owned.callback(loaded.layer_weights.close)
        for note in owned.enter_context(own_defaults(loaded.module)):
            if mesh.rank == 0:
                logger.warning("%s", note)
        return loaded

    loaded = agreement.together(load)
    loaded = replace(loaded, contents=loaded.contents | files.gather())
    if mapping is not None and section.load != "random":
        from megakv.fairkv.placement import check_weights

        check_weights(mapping, loaded.module, comm)
    name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
    name += f" + {section.adapter}" if section.adapter else ""
    return MegaKVEngine(loaded, parsed, _make_runtime(loaded, parsed, comm, mapping), name, mapping, owned)


def _mapping(config: FairKVConfig, tp_size: int, agreement: Agreement) -> HeadMapping | None:
    """The mapping of KV heads that the JSON names, on all ranks the same; a rank without one agrees with all."""

    def read() -> HeadMapping | None:
        if config.mapping is None:
            return None
        from megakv.fairkv.placement import read_mapping

        return read_mapping(config, tp_size)

    return agreement.same_file(MAPPING, read)


def _head_map(
    given: str | Path | nn.Module, parsed: MegaKVConfig, mapping: HeadMapping | None, model: PreTrainedConfig
) -> HeadMap | None:
    """Where the JSON places heads; settings that do not fit the model or the device end here, before any weight."""
    own = given.dtype if isinstance(given, PreTrainedModel) else model.get_text_config().dtype
    dtype, accelerator = parsed.dtype or own or torch.float32, get_accelerator()
    if dtype not in accelerator.supported_dtypes():
        setting = "the model's own dtype" if parsed.dtype is None else "dtype"
        allowed = " or ".join(repr(kind) for name, kind in DTYPES.items() if name in accelerator.supported_dtypes())
        raise CombinationError(
            "machine", f"{setting} = {dtype} is not supported on {accelerator.device_name()}: set dtype to {allowed}"
        )
    config = parsed.megakv.fairkv
    if config.budget is not None:
        layers, _, kv_heads = head_counts(model)
        config.make_method(layers, kv_heads)
    if mapping is None:
        return None
    from megakv.fairkv.placement import place_heads

    return place_heads(mapping, model)


def _make_runtime(
    loaded: LoadedModel, config: MegaKVConfig, comm: Communicator, mapping: HeadMapping | None
) -> Runtime:
    """What the attention modules of an engine's model call. Every rank must call it."""
    section, model = config.megakv, loaded.module
    _, heads, kv_heads = head_counts(model.config)
    shape = None
    if section.context_parallel.profile is not None or section.runahead.table is not None:
        # Something is predicted from the model's sizes, if its config tells them.
        with suppress(ValueError):
            shape = ModelShape.from_config(model.config, dtype=model.dtype)
            # The offload engine listens to attention: there layers are PyTorch's.
            own = comm.mesh.device.type == "cpu" and not section.offload.enabled
            shape = replace(shape, fused=own and is_kind(model.config.model_type))
    copies = section.fairkv.copies
    replicas: HeadReplicas | None = None
    if mapping is not None:
        from megakv.fairkv.replicas import HeadReplicas

        replicas = HeadReplicas(mapping, loaded.head_map, comm, copies)
    if replicas is not None and replicas.shared and copies == "batch" and comm.mesh.rank == 0:
        logger.warning(
            "megakv.fairkv.copies = 'batch': copies of heads divide a batch, so nothing is gained with one sequence; "
            "'tokens' divides each sequence"
        )
    planner = PassPlanner(
        comm=comm,
        config=section.context_parallel,
        heads=heads,
        kv_heads=kv_heads,
        shape=shape,
        runahead=section.runahead,
        divided=replicas is not None and replicas.shared,
    )
    fairkv, prefill = section.fairkv, section.context_parallel.prefill
    first_only = serves_first_turns_only(prefill, compresses=fairkv.budget is not None, divided=planner.divided)
    if first_only and comm.mesh.rank == 0 and comm.mesh.cp_size > 1:
        logger.warning(
            "megakv.context_parallel.prefill = %r serves first turns alone: what is compressed or shared by replicas "
            "does not travel, so later turns attend to it by 'pass_q'",
            prefill,
        )
    compressor = None if fairkv.budget is None else Compressor(fairkv, loaded.head_map, comm, replicas)
    return Runtime(comm, planner, compressor, replicas, dtype=model.dtype)
