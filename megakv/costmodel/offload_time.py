"""Predicted times with keys and values off the accelerator, from a hardware profile and the link to host memory."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.offload import LayerCosts, may_pay, shared_attend_seconds
from megakv.costmodel.offload_disk import Lot, disk_seconds, mean_costs, placed
from megakv.costmodel.offload_pipeline import RESIDENT, WeightTimes, group_times, step_seconds
from megakv.costmodel.shape import ModelShape
from megakv.offload.config import OffloadConfig
from megakv.offload.division import Division
from megakv.offload.scheduler import divide, split_point

CHUNK_TOKENS = 256
"""Tokens of a chunk of activations, as ``megakv.offload.chunk_tokens``."""


def layer_costs(
    profile: HardwareProfile,
    link: Curve,
    model: ModelShape,
    *,
    tp_size: int = 1,
    device_s: float = 0.0,
    sharers: int = 1,
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
    sharers : int
        Ranks of a host, which divide the bandwidth of its memory, for their links and for attending there (KVPR, A.7),
        and that of its disk.
    """
    shape = model.attention(tp_size=tp_size)
    width = shape.kv_heads * (shape.key_dim + shape.value_dim)
    bandwidth, host_attend_s = link.bandwidth, 0.0
    if profile.host_memory_bandwidth is not None:
        bandwidth = min(bandwidth, profile.host_memory_bandwidth / sharers)
        host_attend_s = shared_attend_seconds(shape.kv_row_bytes / profile.host_memory_bandwidth, sharers)
    disk, inputs = (profile.disk_bandwidth or 0.0) / sharers, model.hidden * model.element_bytes
    return LayerCosts(
        kv_s=shape.kv_row_bytes / bandwidth,
        activation_s=inputs / bandwidth,
        disk_kv_s=disk_seconds(shape.kv_row_bytes, bandwidth, disk),
        disk_activation_s=disk_seconds(inputs, bandwidth, disk),
        recompute_s=2 * model.hidden * width / (profile.recompute_flops or profile.matmul_flops),
        transfer_s=link.latency,
        device_s=device_s,
        host_attend_s=host_attend_s,
    )


def offloaded_ttit(
    profile: HardwareProfile,
    link: Curve,
    model: ModelShape,
    workload: Workload,
    method: str,
    *,
    tp_size: int = 1,
    plan: str = "auto",
    weights: bool = False,
    groups: int = 1,
    sharers: int = 1,
    memory_bytes: int | None = None,
) -> float:
    """Seconds of one decoding step whose layers divide their tokens as the scheduler would.

    Parameters
    ----------
    profile, model, workload, method, tp_size
        As `ttit_seconds`.
    link : Curve
    plan : str
        As ``megakv.offload.method``; ``auto`` is the fastest. The host's own attention is among them where the
        profile knows the bandwidth of its memory.
    weights : bool
        Whether the layers' weights come over the link, too.
    groups : int
        Groups of sequences that a layer's weights serve, as ``megakv.offload.num_gpu_batches``.
    sharers : int
        As for `layer_costs`.
    memory_bytes : int, optional
        Of the host, for a rank's rows: those beyond lie on disk. None: there is room for all.
    """
    layers, groups = len(model.layers), min(groups, len(workload.new))
    device_s = ttit_seconds(profile, model, workload, method, tp_size=tp_size) / (layers * groups)
    costs = layer_costs(profile, link, model, tp_size=tp_size, device_s=device_s, sharers=sharers)
    sent = weight_times(link, model, tp_size=tp_size) if weights else RESIDENT
    if groups == 1:
        planned = costs.with_offloaded_weights(kv_weights_s=sent.keys_s, other_weights_s=sent.others_s)
    else:
        planned = costs.in_column(weights_s=sent.keys_s + sent.others_s, num_gpu_batches=groups)
    # With a disk, windows are not looked at: the first tokens, which they leave out, are those in memory.
    seen = seen_tokens(model, workload) if memory_bytes is None else workload.total
    tokens = -(-seen // (workload.size * groups))

    def seconds(name: str, lots: Sequence[Lot]) -> float:
        found = planned_division(name, planned, tokens, lots)
        own = mean_costs(costs, lots, found.recomputed, found.on_host) if lots else costs
        chunk = tokens if name == "kvpr" else CHUNK_TOKENS
        times = group_times(own, found.recomputed, found.on_host, found.streamed, chunk=chunk, outside_s=0.0)
        return step_seconds([times] * groups, layers, sent)

    plans = ["stream", "kvpr", "chunked", *(["cpu_rank", "all"] if planned.host_attend_s else [])]
    if plan != "auto":
        plans = [plan if plan in plans else "stream"]
    lots: list[Sequence[Lot]] = [()]
    if memory_bytes is not None:
        lots = placements(model, tokens, memory_bytes / (layers * groups), plan=plan, tp_size=tp_size)
    return min(seconds(name, each) for name in plans for each in lots)


def seen_tokens(model: ModelShape, workload: Workload) -> int:
    """Tokens of all sequences that a decoding step sees in a layer, a mean over layers: windows leave some out."""
    held = [new + cached for new, cached in zip(workload.new, workload.cached, strict=True)]
    seen = (min(count, layer.window or count) for layer in model.layers for count in held)
    return -(-sum(seen) // len(model.layers))


def placements(
    model: ModelShape, tokens: int, share_bytes: float, *, plan: str = "auto", tp_size: int = 1
) -> list[Sequence[Lot]]:
    """Where a layer's rows may lie, beyond its share of host memory on disk; all taken to be of one sequence.

    Parameters
    ----------
    model : ModelShape
    tokens : int
    share_bytes : float
    plan : str
        As ``megakv.offload.method``.
    tp_size : int
    """
    row, inputs = model.attention(tp_size=tp_size).kv_row_bytes, model.hidden * model.element_bytes
    kept = {inputs if plan in ("auto", "kvpr", "chunked") and may_pay(inputs, row) else 0}
    # `auto` leaves activations out where keys and values are the better use of the memory.
    kept |= {0} if plan == "auto" else set()
    return [placed([tokens], share_bytes, row_bytes=row, input_bytes=each) for each in sorted(kept)]


def planned_division(
    name: str, costs: LayerCosts, tokens: int, lots: Sequence[Lot], *, chunk: int = CHUNK_TOKENS
) -> Division:
    """Of a group's tokens by a plan; `lots` say which of them lie on disk, where any do."""
    most = sum(lot.inputs for lot in lots) if lots else tokens
    host = sum(lot.rows_in_memory for lot in lots) if lots else tokens
    if name == "stream":
        return Division(tokens)
    if name == "kvpr":
        return split_point(costs, tokens, most=most, lots=lots)
    return divide(
        costs,
        tokens,
        chunk=chunk,
        recompute=name != "cpu_rank",
        host=0 if name == "chunked" else host,
        most=most,
        lots=lots,
    )


def layer_weight_bytes(model: ModelShape, *, tp_size: int = 1) -> int:
    """Bytes of one layer's weights on one rank, a mean over layers."""
    return (model.weight_bytes - model.embedding * model.element_bytes) // (len(model.layers) * tp_size)


def weight_times(link: Curve, model: ModelShape, *, tp_size: int = 1) -> WeightTimes:
    """Seconds of sending a layer's weights: those of keys and values, and the others."""
    shape = model.attention(tp_size=tp_size)
    keys = model.hidden * shape.kv_heads * (shape.key_dim + shape.value_dim) * model.element_bytes
    return WeightTimes(link.at(keys), link.at(layer_weight_bytes(model, tp_size=tp_size) - keys))


def moved_seconds(link: Curve, model: ModelShape, tokens: int, *, tp_size: int = 1, weights: bool = False) -> float:
    """Seconds that the link takes while a prompt is read: no prefill is faster.

    Keys and values of a rank's tokens go out, layer by layer; weights, where they are off the accelerator, come in
    meanwhile.
    """
    out = link.at(tokens * model.attention(tp_size=tp_size).kv_row_bytes)
    into = link.at(layer_weight_bytes(model, tp_size=tp_size)) if weights else 0.0
    return len(model.layers) * max(out, into)


def recomputes(model: ModelShape, *, tp_size: int = 1) -> bool:
    """Whether a token's activations are smaller than its keys and values: else recomputing them cannot pay."""
    return may_pay(model.hidden * model.element_bytes, model.attention(tp_size=tp_size).kv_row_bytes)


def host_bytes(model: ModelShape, tokens: int, *, batch: int = 1, tp_size: int = 1) -> int:
    """Host memory of a rank: keys and values, and activations where they may be recomputed from.

    Parameters
    ----------
    model : ModelShape
    tokens : int
        Of each sequence, on the rank.
    batch : int
        Sequences.
    tp_size : int
        Tensor-parallel degree.
    """
    rows = [model.attention(tp_size=tp_size).kv_row_bytes]
    if recomputes(model, tp_size=tp_size):
        rows.append(model.hidden * model.element_bytes)
    return len(model.layers) * batch * sum(paged_bytes(tokens, row, OffloadConfig().page_kib << 10) for row in rows)


def paged_bytes(tokens: int, row_bytes: int, page_bytes: int) -> int:
    """Bytes of the pages that a sequence's rows of one layer take, room in the last one included."""
    page = max(row_bytes, page_bytes)
    return page * -(-tokens // (page // row_bytes))
