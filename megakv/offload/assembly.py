"""The offload engine of a model as the JSON asks for it; what cannot fit is refused here, with the numbers."""

from __future__ import annotations

import logging
import math
import os
from contextlib import ExitStack, suppress

from transformers import PreTrainedModel

from megakv.base.errors import CombinationError, in_units
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.stored_rows import stored_bytes
from megakv.distributed.agreement import Agreement
from megakv.forward.runtime import Runtime
from megakv.injection.policy import depends_on_length
from megakv.offload.config import GIB, OffloadConfig
from megakv.offload.host_memory import available_memory, check_host_budget
from megakv.offload.method import AUTO
from megakv.offload.pages import PagePool
from megakv.offload.profile import read_profile
from megakv.offload.runtime import Offloader
from megakv.offload.weights import LayerWeights
from megakv.weights.placement.attention import attention_modules
from megakv.weights.tensor_parallel import NormOverHeads

logger = logging.getLogger(__name__)


def make_offloader(
    model: PreTrainedModel, config: OffloadConfig, runtime: Runtime, layers: int, weights: LayerWeights | None = None
) -> Offloader | None:
    """The offload engine that the JSON asks for, or None, of a model with MegaKV's attention attached.

    `weights` of the decoder layers, where they are offloaded, have taken their part of a budget. A ValueError
    if a budget cannot be had, or the method cannot work with the model; a MegaKVError if that is so on another rank.
    """
    if not config.enabled:
        return None
    free = available_memory()
    # Nobody takes any before all have looked.
    runtime.comm.barrier()
    with ExitStack() as made:

        def build() -> Offloader:
            _check_settings(config)
            held = 0 if weights is None else weights.host_bytes
            check_host_budget(config.host_bytes - held, free, ranks=runtime.comm.watch.neighbours)
            # Keys and values that go down a chain come without activations.
            recomputes = _recomputes(config, model) and not runtime.planner.gathers
            # One of another machine is refused before any work.
            read_profile(config, model.dtype)
            offloader = Offloader(config, runtime, model, layers=layers, recomputes=recomputes, weights=weights)
            made.callback(offloader.close)
            _check_pages(config, offloader.pool, layers)
            return offloader

        # One rank without its budgets is the end for all.
        offloader = Agreement(runtime.comm).together(build)
        made.pop_all()
    if config.recomputes and config.method != AUTO and runtime.comm.mesh.rank == 0:
        _say_what_cannot_pay(config, model, runtime.comm.mesh.tp_size)
    return offloader


def _say_what_cannot_pay(config: OffloadConfig, model: PreTrainedModel, tp_size: int) -> None:
    """A warning where a method that was asked for by name will recompute nothing."""
    with suppress(ValueError):
        # If the model's config tells its sizes.
        shape = ModelShape.from_config(model.config, dtype=model.dtype)
        inputs, row = shape.input_bytes, shape.attention(tp_size=tp_size).kv_row_bytes
        if not config.keeps_inputs(inputs, stored := stored_bytes(shape, row, config.sizes)):
            logger.warning(
                "megakv.offload.method = %r recomputes nothing here: the activations of a token are %d bytes in a "
                "layer, its keys and values on a rank only %d, so no activations are kept, and keys and values are "
                "sent or attended to where they lie",
                config.method,
                inputs,
                stored,
            )


def _gigabytes(nbytes: int) -> str:
    """A budget that holds so many bytes, in GiB, rounded up."""
    size = nbytes / GIB
    unit = 10 ** (math.floor(math.log10(size)) - 2)
    return f"{math.ceil(size / unit - 1e-9) * unit:.3g}"


def _check_settings(config: OffloadConfig) -> None:
    """Refuse a budget in which no page has room, and more threads than cores: they would only wait for each other."""
    page = config.page_kib << 10
    for name, gigabytes in (("host_gb", config.host_gb), ("disk_gb", config.disk_gb)):
        if gigabytes and int(gigabytes * GIB) < page:
            otherwise = "" if name == "host_gb" else ", or leave it out"
            raise CombinationError(
                "room",
                f"megakv.offload.{name} = {gigabytes!r} is {in_units(gigabytes * GIB)}, less than one page of "
                f"megakv.offload.page_kib = {config.page_kib}; make it {_gigabytes(page)} or more, or lower "
                f"page_kib{otherwise}",
            )
    cores = len(os.sched_getaffinity(0))
    if config.cpu_threads is not None and config.cpu_threads > cores:
        raise CombinationError(
            "machine",
            f"megakv.offload.cpu_threads = {config.cpu_threads}: this process may use {cores} cores; allowed: as many "
            "or fewer",
        )


def _check_pages(config: OffloadConfig, pool: PagePool, layers: int) -> None:
    """Refuse budgets in which not even one short sequence has room."""
    needed = layers * (2 if config.recomputes and config.method != AUTO else 1)
    if pool.capacity < needed:
        raise CombinationError(
            "room",
            f"{pool.budgets()}: {pool.capacity} pages of megakv.offload.page_kib = {config.page_kib}, but a sequence "
            f"needs {needed} of them at least, as every layer has its own; raise megakv.offload.host_gb to "
            f"{_gigabytes(needed * pool.page_bytes)} or more, or lower page_kib",
        )


def _recomputes(config: OffloadConfig, model: PreTrainedModel) -> bool:
    """Whether the method recomputes; refused where it must and the model does not allow it."""
    reason = _not_recomputable(model) if config.recomputes else None
    if reason is not None and config.method != AUTO:
        raise CombinationError(
            "inputs",
            f"megakv.offload.method = {config.method!r} cannot work with model type {model.config.model_type!r}: "
            f"{reason}; use 'stream' or 'auto'",
        )
    return config.recomputes and reason is None


def _not_recomputable(model: PreTrainedModel) -> str | None:
    """Why keys of earlier tokens cannot be recomputed from their activations on one rank; None where they can."""
    inside = (inner for module in attention_modules(model) for inner in module.modules())
    if depends_on_length(model) and any(hasattr(module, "rope_type") for module in inside):
        return (
            "its rotary frequencies change with the length, and its attention modules do not show what they rotate with"
        )
    if any(isinstance(module, NormOverHeads) for module in model.modules()):
        return (
            "its norm of keys is over all heads, which tensor_parallel.tp_size > 1 puts on several ranks, so no rank "
            "can recompute keys by itself"
        )
    return None
