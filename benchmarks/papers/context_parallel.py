"""Context parallelism: TTFT, TTIT and the choice between pass-KV and pass-Q of Llama 3 405B on 8 to 128 H100 GPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import (
    Workload,
    attention_flops,
)
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.machine_spec import MachineSpec
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import AttentionShape, ModelShape

from .fit import Constant, Constants, changed, link, model_shape
from .published import Cell, Headline, Table, cells_of

NAMES = (
    "context_parallel_prefill",
    "context_parallel_table_4",
    "context_parallel_table_5",
    "context_parallel_table_6",
    "context_parallel_table_7",
    "context_parallel_table_8",
    "context_parallel_decoding",
    "context_parallel_decoding_by_context",
    "context_parallel_figure_7",
)
WHOLE_PROMPTS = "context_parallel_prefill"
PARTIAL = "partial_prefill_layer_s"
"""Seconds that a layer of the paper's partial prefill (Table 4) takes beside its work. They are its own code's, not the
machine's: 128,000 tokens on 4 hosts with nothing cached take 11.46 s that way and 10.95 s as a full prefill (Table 7),
4.1 ms a layer. So no machine's preset has them."""
TP = 8
STANDALONE_FLOPS = 540e12
"""FlashAttention-3 by itself at 8K tokens, what the paper calls 100% (Section 4.2.3)."""
MILLION = 1_000_000
CONSTANTS = {
    "matmul_efficiency": Constant(0.6, 0.2, 0.8),
    "attention_efficiency": Constant(0.65, 0.2, 1.0),
    "memory_efficiency": Constant(0.8, 0.4, 0.95),
    PARTIAL: Constant(5e-3, 1e-5, 2e-2),
    "step_s": Constant(2e-4, 1e-6, 5e-3),
    "collective_s": Constant(1e-4, 1e-6, 5e-4),
    "between_bandwidth": Constant(30e9, 10e9, 50e9),
    "between_latency_s": Constant(3e-5, 2e-6, 2e-4),
    "collective_bandwidth": Constant(40e9, 10e9, 50e9),
}


def machine(constants: Constants) -> MachineSpec:
    """Grand Teton training hosts."""
    between = link(
        constants["between_bandwidth"],
        constants["between_latency_s"],
        collective_bandwidth=constants["collective_bandwidth"],
    )
    names = ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "step_s", "collective_s")
    return changed(PRESETS["h100-rdma"].name, between=between, **{name: constants[name] for name in names})


def predict(cell: Cell, constants: Constants) -> float:
    """Seconds, or a ratio of times."""
    setting = cell.setting
    if "part" in setting:
        return part(cell, constants)
    if "ratio" in setting:
        hosts, context = setting["hosts"], setting["context"]
        tensor_parallel = ttft(constants, context, cp=1, tp=TP * hosts)
        return tensor_parallel / ttft(constants, context, cp=hosts)
    if "scaled" in setting or "read_by" in setting:
        scaled = setting.get("scaled") or setting["read_by"]
        sizes = {"cp": 1, "tp": TP, scaled: setting["hosts"] * (TP if scaled == "tp" else 1)}
        return (ttit if "scaled" in setting else ttft)(constants, setting["context"], **sizes)
    if setting.get("time") == "ttit":
        return ttit(constants, setting["context"], cp=setting["cp"], tp=setting["tp"])
    if "cached" in setting:
        return partial_ttft(constants, setting["new"], setting["cached"], cp=setting["cp"], method=setting["method"])
    return ttft(constants, setting["context"], cp=setting["cp"], tp=setting.get("tp", TP), method=setting.get("method"))


def part(cell: Cell, constants: Constants) -> float:
    """Seconds of a part of one layer's attention: of a prefill (Table 5), or of decoding as a CUDA graph (Table 8)."""
    setting = cell.setting
    if "new" in setting:
        new, cached, cp = setting["new"], setting["cached"], setting["cp"]
        profile, work = _profile(constants, cp), Workload((new,), (cached,), cp)
        if setting["part"] == "attention":
            return Kernels(profile, _attention()).block(new / cp, (new + cached) / cp)
        steps = LayerTimes(profile, _attention(), work).steps(setting["method"], 0)
        return steps.transfer_s if setting["part"] == "send_recv" else steps.return_s
    hosts, batch, context = setting["hosts"], setting["batch"], setting["context"]
    profile = _profile(constants, hosts, captured=True)
    if setting["part"] == "kernel":
        return -(-batch // hosts) * Kernels(profile, _attention()).block(1, context / hosts)
    work = Workload((1,) * batch, (context,) * batch, hosts)
    return LayerTimes(profile, _attention(), work).predict("pass_q").seconds


@cache
def _model() -> ModelShape:
    """Llama 3 405B; partial outputs travel in the type of Q (Appendix C), and kernels are taken to be fused."""
    return replace(model_shape("llama3_405b", fp8=True), partial_bytes=2, fused=True)


def _attention() -> AttentionShape:
    return _model().attention(tp_size=TP)


def _profile(constants: Constants, cp: int, *, tp: int = TP, captured: bool = False) -> HardwareProfile:
    return machine(constants).profile(cp_size=cp, tp_size=tp, captured=captured)


def ttft(constants: Constants, new: int, *, cached: int = 0, cp: int, tp: int = TP, method: str | None = None) -> float:
    """Seconds of a prefill, pass-KV unless said; Python issues its kernels one by one."""
    times = PrefillTimes(_profile(constants, cp, tp=tp), _model(), Workload((new,), (cached,), cp), tp_size=tp)
    return times.seconds(method or "pass_kv")


def partial_ttft(constants: Constants, new: int, cached: int, *, cp: int, method: str) -> float:
    """Seconds of a prefill over keys and values that stay, as in Table 4."""
    return ttft(constants, new, cached=cached, cp=cp, method=method) + len(_model().layers) * constants[PARTIAL]


def ttit(constants: Constants, context: int, *, cp: int, tp: int) -> float:
    """Seconds of a decoding step, replayed as a CUDA graph (Section 4.3)."""
    profile = _profile(constants, cp, tp=tp, captured=True)
    return ttit_seconds(profile, _model(), Workload((1,), (context,), cp), "pass_q", tp_size=tp)


def flops_per_gpu(seconds: float, *, gpus: int) -> float:
    """Operations a second of each GPU in a prefill of a million tokens, counted as in Appendix A."""
    model = _model()
    attention = len(model.layers) * attention_flops(model.attention(), MILLION, 0, causal=True)
    return (2 * model.parameters * MILLION + attention) / seconds / gpus


def tipping_point(constants: Constants, *, total: int, cp: int) -> float:
    """The miss rate at which pass-KV becomes the faster one, by halving; 0 or 1 where one always is."""
    low, high = math.log(2 * cp / total), 0.0

    def kv_wins(log_rate: float) -> bool:
        new = max(2 * cp, round(total * math.exp(log_rate)))
        times = [partial_ttft(constants, new, total - new, cp=cp, method=method) for method in ("pass_kv", "pass_q")]
        return times[0] <= times[1]

    if kv_wins(low):
        return 0.0
    if not kv_wins(high):
        return 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if kv_wins(middle) else (middle, high)
    return math.exp(high)


def headlines(constants: Constants, table: Table) -> dict[str, Headline]:
    """Figures that the paper's abstract and sections put first; `table` holds those of whole prompts."""
    (eight, sixteen, million) = (Headline(cell.value, predict(cell, constants), cell.use) for cell in cells_of(table))
    reached = flops_per_gpu(million.predicted, gpus=128)
    return {
        "ttft_128k_16_hosts_s": sixteen,
        "ttft_128k_8_hosts_s": eight,
        "ttft_1m_16_hosts_s": million,
        # Both follow from the time of the million tokens.
        "flops_per_gpu": Headline(502e12, reached, million.use),
        "parallel_efficiency": Headline(0.93, reached / STANDALONE_FLOPS, million.use),
        # No cell says it; it lies between cells of Table 4, half of which are fitted.
        "tipping_point_miss_rate": Headline(0.05, tipping_point(constants, total=128_000, cp=4), "reported"),
    }
