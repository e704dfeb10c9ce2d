"""Predicted times with keys and values off the accelerator, from a hardware profile and the link to host memory."""

from __future__ import annotations

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.offload import LayerCosts
from megakv.costmodel.shape import ModelShape
from megakv.offload.scheduler import divide

CHUNK_TOKENS = 256
"""Tokens of a chunk of activations, as ``megakv.offload.chunk_tokens``."""


def layer_costs(
    profile: HardwareProfile, link: Curve, model: ModelShape, *, tp_size: int = 1, device_s: float = 0.0
) -> LayerCosts:
    """Costs of one layer on one rank, per cached token.

    Parameters
    ----------
    profile : HardwareProfile
    link : Curve
        Seconds over bytes, from host memory to the accelerator.
    model : ModelShape
    tp_size : int
    device_s : float
        All other work of the layer.
    """
    shape = model.attention(tp_size=tp_size)
    width = shape.kv_heads * (shape.key_dim + shape.value_dim)
    most = profile.matmul.sizes[-1]
    return LayerCosts(
        kv_s=shape.kv_row_bytes / link.bandwidth,
        activation_s=model.hidden * model.element_bytes / link.bandwidth,
        recompute_s=model.hidden * width * profile.matmul.at(most) / most,
        transfer_s=link.latency,
        device_s=device_s,
    )


def offloaded_ttit(
    profile: HardwareProfile, link: Curve, model: ModelShape, workload: Workload, method: str, *, tp_size: int = 1
) -> float:
    """Seconds of one decoding step whose layers divide their tokens as the scheduler would.

    Parameters
    ----------
    profile, model, workload, method, tp_size
        As `ttit_seconds`.
    link : Curve
    """
    resident = ttit_seconds(profile, model, workload, method, tp_size=tp_size)
    layers = len(model.layers)
    costs = layer_costs(profile, link, model, tp_size=tp_size, device_s=resident / layers)
    return layers * divide(costs, -(-workload.total // workload.size), chunk=CHUNK_TOKENS).seconds


def moved_seconds(link: Curve, model: ModelShape, tokens: int, *, tp_size: int = 1) -> float:
    """Seconds of moving the keys and values of a rank's tokens, all layers, over the link: no prefill is faster."""
    return len(model.layers) * link.at(tokens * model.attention(tp_size=tp_size).kv_row_bytes)


def recomputes(model: ModelShape, *, tp_size: int = 1) -> bool:
    """Whether a token's activations are smaller than its keys and values: else recomputing them cannot pay."""
    return model.hidden * model.element_bytes < model.attention(tp_size=tp_size).kv_row_bytes


def host_bytes(model: ModelShape, tokens: int, *, tp_size: int = 1) -> int:
    """Host memory of a rank for its tokens: keys and values, and activations where they may be recomputed from."""
    row = model.attention(tp_size=tp_size).kv_row_bytes
    if recomputes(model, tp_size=tp_size):
        row += model.hidden * model.element_bytes
    return len(model.layers) * tokens * row
