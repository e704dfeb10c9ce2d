"""Predicted times with keys and values off the accelerator, from a hardware profile and the link to host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.memory import GIB
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.stored_rows import may_pay
from megakv.offload.method import AUTO, METHODS, PLAIN, Split, methods_of
from megakv.offload.pipeline import StepTimes, layer_times, step_seconds
from megakv.offload.prices import RESIDENT, LayerPrices, Placement, WeightTimes, disk_seconds, group_prices, placed

Objective = Literal["latency", "throughput"]


def layer_prices(
    profile: HardwareProfile,
    link: Curve,
    model: ModelShape,
    *,
    tp_size: int = 1,
    device_s: float = 0.0,
    sharers: int = 1,
) -> LayerPrices:
    """Prices of one layer on one rank, per cached token; `device_s` is all its other work.

    `sharers` ranks of a host divide the bandwidth of its memory and its disk (KVPR, A.7).
    """
    row, inputs = model.attention(tp_size=tp_size).kv_row_bytes, model.input_bytes
    bandwidth, host_attend_s = link.bandwidth, 0.0
    if profile.host_memory_bandwidth is not None:
        bandwidth = min(bandwidth, profile.host_memory_bandwidth / sharers)
        host_attend_s = sharers * row / profile.host_memory_bandwidth
    disk, flops = (profile.disk_bandwidth or 0.0) / sharers, profile.recompute_flops or profile.matmul_flops
    return LayerPrices(
        kv_s=row / bandwidth,
        activation_s=inputs / bandwidth,
        disk_kv_s=disk_seconds(row, bandwidth, disk),
        disk_activation_s=disk_seconds(inputs, bandwidth, disk),
        recompute_s=2 * model.hidden * (row // model.element_bytes) / flops,
        transfer_s=link.latency,
        device_s=device_s,
        host_attend_s=host_attend_s,
    )


@dataclass(frozen=True)
class OffloadedStep:
    """A decoding step over an offloaded cache, as the engine would divide its tokens."""

    seconds: float
    times: StepTimes  # Of one group of sequences in one layer; how its tokens are divided.
    split: Split
    weights: WeightTimes


def offloaded_step(
    profile: HardwareProfile,
    link: Curve,
    model: ModelShape,
    workload: Workload,
    method: str,
    *,
    tp_size: int = 1,
    plan: str = "auto",
    weights: bool | Literal["disk"] = False,
    groups: int = 1,
    sharers: int = 1,
    memory_bytes: int | None = None,
) -> OffloadedStep:
    """One decoding step, as of `ttit_seconds`, whose layers split their tokens as the engine would.

    plan, groups: as ``megakv.offload.method`` and ``num_gpu_batches``.
    weights: as ``megakv.offload.weights``: whether the layers' weights come over the link too, and from where.
    memory_bytes: of the host, for a rank's rows: those beyond lie on disk. None: there is room for all.
    Raises ValueError where rows, or weights, would lie on a disk that the profile does not know.
    """
    layers, groups = len(model.layers), min(groups, len(workload.new))
    device_s = ttit_seconds(profile, model, workload, method, tp_size=tp_size) / (layers * groups)
    prices = layer_prices(profile, link, model, tp_size=tp_size, device_s=device_s, sharers=sharers)
    disk = (profile.disk_bandwidth or 0.0) / sharers if weights == "disk" else None
    sent = weight_times(link, model, tp_size=tp_size, disk_bytes_s=disk) if weights else RESIDENT
    prices = prices.with_weights(sent, groups)
    # With a disk, windows are not looked at: the first tokens, which they leave out, are those in memory.
    seen = seen_tokens(model, workload) if memory_bytes is None else workload.total
    tokens = -(-seen // (workload.size * groups))
    placements: list[tuple[Placement, ...]] = [(Placement(tokens, tokens, tokens, tokens),)]
    if memory_bytes is not None:
        placements = placements_of(model, tokens, memory_bytes / (layers * groups), plan=plan, tp_size=tp_size)
    if profile.disk_bandwidth is None:
        placements = [each for each in placements if not any(placement.on_disk for placement in each)]
    if not placements:
        raise ValueError(
            f"{(memory_bytes or 0) / GIB:.3g} GiB of host memory do not hold what is cached, and the profile has no "
            "disk_bandwidth for the rest: allowed: more of --host-gb, or add disk_bandwidth to the profile"
        )
    steps = []
    for each in placements:
        group = group_prices(prices, each, attends=prices.host_attend_s > 0)
        for way in methods_of(plan).values():
            # What a method does not fit is streamed.
            split = way.split(group) or METHODS[PLAIN].split(group)
            assert split is not None
            times = layer_times(group, split)
            steps.append(OffloadedStep(step_seconds([times] * groups, layers, sent), times, split, sent))
    return min(steps, key=lambda step: step.seconds)


def seen_tokens(model: ModelShape, workload: Workload) -> int:
    """Tokens of all sequences that a decoding step sees in a layer, a mean over layers: windows leave some out."""
    held = [new + cached for new, cached in zip(workload.new, workload.cached, strict=True)]
    seen = (min(count, layer.window or count) for layer in model.layers for count in held)
    return -(-sum(seen) // len(model.layers))


def placements_of(
    model: ModelShape, tokens: int, share_bytes: float, *, plan: str = "auto", tp_size: int = 1
) -> list[tuple[Placement, ...]]:
    """Where a layer's rows may lie, beyond its share of host memory on disk; all taken to be of one sequence."""
    row, inputs = model.attention(tp_size=tp_size).kv_row_bytes, model.input_bytes
    recomputing = any(each.recomputes for each in methods_of(plan).values())
    # `auto` leaves activations out where keys and values are the better use of the memory.
    kept = {inputs if recomputing and may_pay(inputs, row) else 0, *([0] if plan == AUTO else [])}
    return [placed([tokens], share_bytes, row_bytes=row, input_bytes=each) for each in sorted(kept)]


def layer_weight_bytes(model: ModelShape, *, tp_size: int = 1) -> int:
    """Bytes of one layer's weights on one rank, a mean over layers."""
    return (model.weight_bytes - model.outside_bytes) // (len(model.layers) * tp_size)


def weight_times(link: Curve, model: ModelShape, *, tp_size: int = 1, disk_bytes_s: float | None = None) -> WeightTimes:
    """Seconds of sending a layer's weights, those of keys and values, and the others: from host memory, or a disk.

    Raises ValueError where the disk's bandwidth is not known, 0.
    """
    shape = model.attention(tp_size=tp_size)
    # Those of latents are expanded by further weights.
    keys = model.hidden * shape.kv_row_bytes + shape.expansion * model.element_bytes
    if disk_bytes_s == 0:
        raise ValueError("megakv.offload.weights = 'disk': the profile has no disk_bandwidth; add it to the profile")
    parts = keys, layer_weight_bytes(model, tp_size=tp_size) - keys
    return WeightTimes(*(max(link.at(part), part / disk_bytes_s if disk_bytes_s else 0.0) for part in parts))


def moved_seconds(link: Curve, model: ModelShape, tokens: int, *, tp_size: int = 1, weights: bool = False) -> float:
    """Seconds that the link takes while a prompt is read: keys and values go out, layer by layer, weights come in."""
    out = link.at(tokens * model.attention(tp_size=tp_size).kv_row_bytes)
    into = link.at(layer_weight_bytes(model, tp_size=tp_size)) if weights else 0.0
    return len(model.layers) * max(out, into)


def recomputes(model: ModelShape, *, tp_size: int = 1) -> bool:
    """Whether a token's activations are smaller than its keys and values: else recomputing them cannot pay."""
    return may_pay(model.input_bytes, model.attention(tp_size=tp_size).kv_row_bytes)


def group_counts(batch: int) -> list[int]:
    """Numbers of groups that a batch may go through layers in: powers of two, and a group for each sequence."""
    return sorted({batch, *(1 << level for level in range(batch.bit_length()))})
