"""What a run was, in words: model, mesh, and the methods that served it."""

from __future__ import annotations

from typing import Any

from megakv.base.errors import in_units
from megakv.tracking.measurements import CAPTURED, PERCENTILES, PrefillPlan
from megakv.tracking.report import Answer, RunReport
from megakv.tracking.served import ServedTraffic
from megakv.tracking.tables import passes_by_plan
from megakv.tracking.units import duration

NAMES = {
    "pass_kv": "pass-KV",
    "pass_q": "pass-Q",
    "all_gather": "all-gather",
    "runahead": "KV-Runahead",
    "tsp": "TSP",
    "tsp_causal": "TSP (causal)",
    "replicated": "replicated queries",
    "tensor": "slices of weights",
    "local": "local attention",
    "single": "one rank",
}
SECTION = "megakv"
STAGES = {"prefill": "prefill", "decode": "decoding"}


def overview(report: RunReport) -> dict[str, str]:
    """By name, what to know of a run before its numbers."""
    ranks, mesh = len(report.ranks), report.mesh
    hosts = len({rank.host for rank in report.ranks})
    where = f"CP {mesh['cp']} x TP {mesh['tp']}, {ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"
    simulated = report.machine.get("simulated")
    rate = report.prompt_tokens / report.ttft_s if report.ttft_s else None
    return {
        "model": report.model,
        "mesh": where if simulated is None else f"{where}, simulated: {simulated}",
        "dtype": report.dtype or str(setting(report, "dtype") or "-").removeprefix("torch."),
        **methods(report),
        "tokens": token_counts(report),
        "TTFT": duration(report.ttft_s) + (f" ({rate:,.0f} tokens/s)" if rate else ""),
        "TTIT": duration(report.ttit_s),
        "tokens equal to plain transformers": _equality(report),
    }


def _equality(report: RunReport) -> str:
    words = {True: "yes", False: "NO", None: "not compared"}[report.tokens_equal]
    if report.logits is None:
        return words
    return f"no, at a near tie: {report.logits}" if report.logits.near_tie else f"{words}: {report.logits}"


def token_counts(report: RunReport | Answer) -> str:
    """Tokens that were read and generated, and beside them what was cached before."""
    cached = f" (behind {report.cached_tokens:,} cached)" if report.cached_tokens else ""
    return f"{report.prompt_tokens or 0:,} prompt{cached} + {report.new_tokens or 0:,} new"


def served(traffic: ServedTraffic) -> dict[str, str]:
    """What a server did, in words."""
    scalars = traffic.scalars()

    def tails(name: str) -> str:
        return ", ".join(
            f"p{share} {duration(scalars[f'served/{name}/p{share}'])}"
            for share in PERCENTILES
            if f"served/{name}/p{share}" in scalars
        )

    ended = f"{traffic.cancelled:,} cancelled, {traffic.failed:,} failed, {traffic.preempted:,} preempted"
    if traffic.compressed:
        ended += f", {traffic.compressed:,} with compressed caches"
    rate = f", {traffic.hit_tokens / traffic.prompt_tokens:.1%} hit rate" if traffic.prompt_tokens else ""
    generated = f"{traffic.new_tokens:,}"
    if traffic.proposed_tokens:
        generated += f"; {traffic.accepted_tokens:,} of {traffic.proposed_tokens:,} proposed tokens accepted"
    return {
        "requests": f"{traffic.requests:,} in {duration(traffic.seconds)}; {ended}",
        "prompt tokens": f"{traffic.prompt_tokens:,}, of them {traffic.computed_tokens:,} computed{rate}",
        "generated tokens": generated,
        "TTFT": tails("ttft_s") or "-",
        "time per token": tails("token_s") or "-",
        "most at a time": f"{int(scalars.get('served/waiting_max', 0)):,} waiting, "
        f"{int(scalars.get('served/running_max', 0)):,} running",
    }


def methods(report: RunReport) -> dict[str, str]:
    """How the run was served, by stage, and what ``auto`` took."""
    found = {name: words for stage, name in STAGES.items() if (words := _attention(report, stage))}
    if (checked := report.candidates) is not None:
        found["candidates"] = (
            f"{report.new_tokens / max(1, checked.steps):.2f} tokens per step; {checked.accepted:,} of "
            f"{checked.proposed:,} proposed tokens accepted"
        )
    if report.products:
        found["products"] = ", ".join(
            f"{'more' if each.last is None else f'to {each.last} rows'} {each.library} "
            f"({each.flops[each.library] / 1e9:,.0f} GFLOP/s)"
            for each in report.products
        )
    found["keys and values"] = _cache(report)
    if report.weights is not None:
        found["weights"] = _weights(report)
    return found


def _weights(report: RunReport) -> str:
    """The format of the weights, and the largest rank's bytes by type."""
    held = max((each.weight_bytes for each in report.ranks), key=lambda held: sum(held.values()))
    asked = setting(report, "megakv.weights.format")
    lossy = "" if asked in (None, "as_stored") else " (lossy)"
    parts = ", ".join(f"{in_units(nbytes)} in {kind}" for kind, nbytes in held.items())
    return f"{report.weights}{lossy}" + (f": {parts}" if parts else "")


def setting(report: RunReport, path: str) -> Any:
    """A key of the run's configuration; None where there is no such."""
    found: Any = report.config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _attention(report: RunReport, stage: str) -> str:
    """The methods of a stage, the one that served most first; nothing where there was no such stage."""
    counts = report.methods.get(stage, {})
    if not counts:
        return ""
    total = sum(counts.values())
    if report.mesh["cp"] == 1:
        captured = f", {counts[CAPTURED] / total:.0%} in CUDA graphs" if counts.get(CAPTURED) else ""
        return ("tensor parallelism alone" if report.mesh["tp"] > 1 else NAMES["single"]) + captured
    shares = sorted(counts.items(), key=lambda pair: -pair[1])
    words = ", ".join(
        NAMES.get(name, name) + f" in {count / max(1, total):.0%} of layers" * (len(counts) > 1)
        for name, count in shares
    )
    if setting(report, f"megakv.context_parallel.{stage}") != "auto":
        return words
    return f"auto took {words}" if stage == "decode" or report.prefill is None else _planned(words, report.prefill)


def _planned(words: str, plan: PrefillPlan) -> str:
    """What ``auto`` took for a prompt, and from what."""
    times = ", ".join(f"{NAMES.get(name, name)} {duration(seconds)}" for name, seconds in plan.predicted_s.items())
    taken = NAMES["single"] if plan.chosen == "single" else words
    return f"auto took {taken}" + (f" (predicted: {times})" if times else "")


def _cache(report: RunReport) -> str:
    """Where keys and values were, and how much of them."""
    first = next((rank for rank in report.ranks if rank.offload), None)
    if first is not None:
        bits = first.offload[-1].kv_bits
        lossy = f", in {bits} bits (lossy)" if bits else ""
        auto = "auto took " * (setting(report, f"{SECTION}.offload.method") == "auto")
        return f"off the accelerator: {auto}{passes_by_plan(first)} passes{lossy}"
    if setting(report, "simulated.method") == "offload":
        return "off the accelerator"
    method, budget = (setting(report, f"megakv.fairkv.{key}") for key in ("method", "budget"))
    if budget is not None:
        return f"compressed by {method}, budget {str(budget).removesuffix('.0')} (lossy)"
    return "kept whole"
