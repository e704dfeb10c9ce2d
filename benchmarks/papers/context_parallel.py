"""Context parallelism: TTFT, TTIT and the choice between pass-KV and pass-Q of Llama 3 405B on 8 to 128 H100 GPUs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from megakv.costmodel.context_parallel import (
    Workload,
    attention_flops,
    miss_rate_with_all_to_all,
    new_tokens_hiding_kv,
)
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.machine_spec import MachineSpec
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import ModelShape

from .fit import Constant, Constants, fitted
from .machines import changed, link, model_shape
from .published import Cell

NAMES = (
    "context_parallel_prefill",
    "context_parallel_table_4",
    "context_parallel_decoding",
    "context_parallel_figure_7",
)
TP = 8
STANDALONE_FLOPS = 540e12
"""FlashAttention-3 by itself at 8K tokens, what the paper calls 100% (Section 4.2.3)."""
MILLION = 1_000_000
CONSTANTS = {
    "matmul_efficiency": Constant(0.6, 0.2, 0.8),
    "attention_efficiency": Constant(0.65, 0.2, 1.0),
    "memory_efficiency": Constant(0.8, 0.4, 0.95),
    "layer_s": Constant(5e-3, 1e-5, 2e-2),
    "collective_s": Constant(1e-4, 1e-6, 5e-4),
    "between_bandwidth": Constant(40e9, 10e9, 50e9),
    "between_latency_s": Constant(3e-5, 2e-6, 2e-4),
}


def fit(cells: Sequence[Cell]) -> dict[str, float]:
    """Constants of one half of the cells."""
    return fitted(cells, CONSTANTS, predict)


def machine(constants: Constants) -> MachineSpec:
    """Grand Teton training hosts. A step's time is the preset's: fitted cells show it with the layer's alone."""
    preset = PRESETS["h100-rdma"]
    between = link(
        constants["between_bandwidth"],
        constants["between_latency_s"],
        collective_bandwidth=preset.between.collective_bandwidth,
    )
    return changed(
        preset.name,
        matmul_efficiency=constants["matmul_efficiency"],
        attention_efficiency=constants["attention_efficiency"],
        memory_efficiency=constants["memory_efficiency"],
        layer_s=constants["layer_s"],
        collective_s=constants["collective_s"],
        between=between,
    )


def predict(cell: Cell, constants: Constants) -> float:
    """Seconds, or a ratio of times."""
    setting = cell.setting
    if "ratio" in setting:
        hosts, context = setting["hosts"], setting["context"]
        tensor_parallel = ttft(constants, context, cp=1, tp=TP * hosts)
        return tensor_parallel / ttft(constants, context, cp=hosts)
    if "scaled" in setting:
        sizes = {"cp": 1, "tp": TP, setting["scaled"]: setting["hosts"] * (TP if setting["scaled"] == "tp" else 1)}
        return ttit(constants, setting["context"], **sizes)
    new = setting.get("new", setting.get("context"))
    return ttft(constants, new, cached=setting.get("cached", 0), cp=setting["cp"], method=setting["method"])


def _model() -> ModelShape:
    """Llama 3 405B; partial outputs travel in the type of Q (Appendix C), and kernels are taken to be fused."""
    return replace(model_shape("llama3_405b", fp8=True), partial_bytes=2, fused=True)


def ttft(constants: Constants, new: int, *, cached: int = 0, cp: int, tp: int = TP, method: str = "pass_kv") -> float:
    """Seconds of a prefill; Python issues its kernels one by one."""
    profile = machine(constants).profile(cp_size=cp, tp_size=tp)
    model = _model()
    return PrefillTimes(profile, model, Workload((new,), (cached,), cp), tp_size=tp).seconds(method)


def ttit(constants: Constants, context: int, *, cp: int, tp: int) -> float:
    """Seconds of a decoding step, replayed as a CUDA graph (Section 4.3)."""
    profile = machine(constants).profile(cp_size=cp, tp_size=tp, captured=True)
    model = _model()
    return ttit_seconds(profile, model, Workload((1,), (context,), cp), "pass_q", tp_size=tp)


def flops_per_gpu(seconds: float, *, gpus: int) -> float:
    """What each GPU reached in a prefill of a million tokens, counted as in Appendix A."""
    model = _model()
    attention = len(model.layers) * attention_flops(model.attention(), MILLION, 0, causal=True)
    return (2 * model.parameters * MILLION + attention) / seconds / gpus


def tipping_point(constants: Constants, *, total: int, cp: int) -> float:
    """The miss rate at which pass-KV becomes the faster one, by halving; 0 or 1 where one always is."""
    low, high = math.log(2 * cp / total), 0.0

    def kv_wins(log_rate: float) -> bool:
        new = max(2 * cp, round(total * math.exp(log_rate)))
        times = [ttft(constants, new, cached=total - new, cp=cp, method=method) for method in ("pass_kv", "pass_q")]
        return times[0] <= times[1]

    if kv_wins(low):
        return 0.0
    if not kv_wins(high):
        return 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if kv_wins(middle) else (middle, high)
    return math.exp(high)


def around_the_tipping_point(constants: Constants, *, total: int = 128_000, cp: int = 4) -> dict[str, float]:
    """What the paper says beside it: at 5% the two differ by less than 1%; below 3.25% the exchange is exposed.

    Its Equation 5, with the rates that its own times imply, is below both.
    """
    new = total // 20
    times = [ttft(constants, new, cached=total - new, cp=cp, method=method) for method in ("pass_q", "pass_kv")]
    shape, profile = _model().attention(tp_size=TP), machine(constants).profile(cp_size=cp, tp_size=TP)
    rates = {"flops": Kernels(profile, shape).flops, "bandwidth": profile.exchange.bandwidth}
    hiding = new_tokens_hiding_kv(shape, size=cp, **rates)

    def kv_wins(tokens: int) -> bool:
        return tokens / total >= miss_rate_with_all_to_all(shape, tokens, size=cp, **rates)

    return {
        "pass_q_over_pass_kv_at_5_percent": times[0] / times[1],
        "published_pass_q_over_pass_kv_at_5_percent": 1.0,
        "exposed_below_miss_rate": hiding / total,
        "published_exposed_below_miss_rate": 0.0325,
        "equation_5_miss_rate": bisect_left(range(total), True, key=kv_wins) / total,
    }


def headlines(constants: Constants) -> dict[str, tuple[float, float]]:
    """Published and predicted figures that the paper's abstract and sections put first."""
    million = ttft(constants, MILLION, cp=16)
    reached = flops_per_gpu(million, gpus=128)
    return {
        "ttft_128k_16_hosts_s": (3.8, ttft(constants, 131072, cp=16)),
        "ttft_128k_8_hosts_s": (5.85, ttft(constants, 131072, cp=8)),
        "ttft_1m_16_hosts_s": (77.0, million),
        "flops_per_gpu": (502e12, reached),
        "parallel_efficiency": (0.93, reached / STANDALONE_FLOPS),
        "tipping_point_miss_rate": (0.05, tipping_point(constants, total=128_000, cp=4)),
    }
