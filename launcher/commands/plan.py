"""``megakv plan``: what to run on which machines, what it will cost, and the JSON to start it with."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakv.tracking.files import check_outputs, write_whole

if TYPE_CHECKING:
    from megakv.costmodel.presets import Hardware
    from megakv.costmodel.shape import ModelShape
    from megakv.fairkv.profile import BudgetProfile
    from megakv.planner.choices import Choice, Demand
    from megakv.planner.cluster import ClusterPlanner, Plan
    from megakv.weights.formats.sizes import PackedBits

SHOWN = 8
LEAST_SHARE = 0.001
"""Of the bytes that a rank sends: operations with less are not shown."""
GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--model", required=True, help="folder, config.json, recipe or hub id; no weights are read")
    text = (
        "types of its weights: int8 or q4_1 at load, or a GGUF file's, such as Q4_K_M (default: the file's, or 16 bits)"
    )
    parser.add_argument("--weights", metavar="FORMAT", help=text)
    parser.add_argument("--context", type=int, required=True, help="new tokens of every sequence, T")
    parser.add_argument("--cached", type=int, default=0, help="tokens of every sequence cached before, P (default 0)")
    parser.add_argument("--batch", type=int, default=1, help="sequences that a replica serves at a time (default 1)")
    parser.add_argument("--new-tokens", type=int, default=0, help="tokens to make room for behind each (default 0)")
    parser.add_argument("--gpus", type=int, required=True, help="accelerators there are")
    parser.add_argument("--hardware", required=True, help="a known machine, or a JSON that megakv profile wrote")
    parser.add_argument(
        "--objective",
        choices=("latency", "throughput"),
        default="latency",
        help="what is best: the first token soonest, or most tokens per second over all replicas, generated ones with "
        "--new-tokens (default latency)",
    )
    parser.add_argument(
        "--slo-ttft", type=float, help="longest time to first token in seconds; what serves most within it is best"
    )
    parser.add_argument(
        "--allow-lossy", action="store_true", help="also FP8 weights, and compressed caches where nothing else fits"
    )
    text = "profile of megakv fairkv profile: what KV heads keep of compressed caches, and are placed by on ranks"
    parser.add_argument("--budgets", metavar="FILE", help=text)
    text = "write the mapping of KV heads of the best choice to this file, if one is faster than heads in runs"
    parser.add_argument("--mapping", metavar="FILE", help=text)
    parser.add_argument("--explain", action="store_true", help="where time and memory go, and all that was rejected")
    parser.add_argument("--config", help="write the JSON of the best choice, ready to run, to this file")
    parser.add_argument("--json", help="write all choices, terms and rejections to this file")


def run(arguments: argparse.Namespace) -> None:
    """Rank what can be run on some machines, and write the JSON of the best."""
    import torch
    from tqdm import tqdm

    from megakv.costmodel.presets import hardware
    from megakv.engine.config import load_config
    from megakv.launcher.model_names import model_shape
    from megakv.planner.choices import Demand, choice_config
    from megakv.planner.cluster import ClusterPlanner

    begun = time.perf_counter()
    machine = hardware(arguments.hardware, setting="--hardware")
    demand = Demand(
        context=arguments.context,
        gpus=arguments.gpus,
        cached=arguments.cached,
        batch=arguments.batch,
        new_tokens=arguments.new_tokens,
        slo_ttft_s=arguments.slo_ttft,
        lossy=arguments.allow_lossy,
        objective=arguments.objective,
    )
    _check_files(arguments)
    model = model_shape(arguments.model, dtype=getattr(torch, machine.spec.dtype))
    if arguments.weights is not None:
        model = replace(model, packed=_packed(arguments.weights))
    budgets = _budgets(arguments, model)
    with tqdm(desc="plan", unit="mesh", leave=False, delay=1.0) as bar:

        def progress(done: int, count: int) -> None:
            bar.total = count
            bar.update(done - bar.n)

        planner = ClusterPlanner(machine, model, budgets=budgets, progress=progress)
        found = planner.plan(demand)
    best = found.choices[0]
    config = choice_config(best, machine, model, demand.objective, arguments.mapping)
    load_config(config)
    seconds = time.perf_counter() - begun
    if best.mapping is not None:
        best.mapping.save(arguments.mapping)
    if arguments.config:
        write_whole(arguments.config, (json.dumps(config, indent=2) + "\n").encode())
    if arguments.json:
        values = _values(arguments, machine, demand, planner, found, config)
        values |= {"positions": model.positions, "seconds": seconds}
        write_whole(arguments.json, (json.dumps(values, indent=1) + "\n").encode())
    _show(arguments, machine, demand, planner, found)
    if budgets is not None:
        print(f"\nKV heads of the best: {_placed(best, arguments.mapping)}")
    if model.positions is not None and demand.total > model.positions:
        print(
            f"\nnote: the model's config names {model.positions:,} positions: unless its rotary embedding follows the "
            f"length, a run refuses a prompt of {demand.total:,} tokens"
        )
    print(f"\n{found.evaluated} predictions in {seconds:.1f} s; the best as JSON:")
    print(json.dumps(config, indent=2))


def _packed(name: str) -> PackedBits:
    from megakv.weights.formats.sizes import KNOWN

    if name not in KNOWN:
        raise ValueError(f"--weights {name}: allowed: {', '.join(KNOWN)}")
    return KNOWN[name]


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse budgets that nothing would come of, and files that could not be written in the end."""
    check_outputs({"--config": arguments.config, "--json": arguments.json}, {"--budgets": arguments.budgets})
    if arguments.budgets is None and arguments.mapping is None:
        return
    for name, given, other in (("mapping", arguments.mapping, "budgets"), ("budgets", arguments.budgets, "mapping")):
        if given is None:
            raise ValueError(f"--{other} without --{name}: KV heads are placed by --budgets, and written to --mapping")
    if not arguments.allow_lossy:
        raise ValueError(f"--budgets {arguments.budgets}: compressed caches are not exact: only with --allow-lossy")
    others = {f"--{name}": getattr(arguments, name) for name in ("budgets", "config", "json")}
    check_outputs({"--mapping": arguments.mapping}, others, make_folders=False)


def _budgets(arguments: argparse.Namespace, model: ModelShape) -> BudgetProfile | None:
    """The profile of --budgets, of this model and of the method that a plan compresses by."""
    from megakv.fairkv.config import FairKVConfig
    from megakv.fairkv.profile import load_budgets
    from megakv.launcher.model_names import model_name

    if arguments.budgets is None:
        return None
    budgets, planned = load_budgets(arguments.budgets, setting="--budgets"), FairKVConfig().method
    try:
        if model.latent is not None:
            raise ValueError(
                "the model caches latents, one head for all ranks: there are no heads to place; leave out --budgets"
            )
        budgets.check_model(model_name(arguments.model), len(model.layers), model.cached_heads)
        if budgets.method not in (None, planned):
            raise ValueError(f"is of method {budgets.method!r}, but a plan compresses by {planned!r}: measure it anew")
    except ValueError as error:
        raise ValueError(f"--budgets = {arguments.budgets!r}: {error}") from error
    return budgets


def _placed(best: Choice, path: str) -> str:
    if best.mapping is not None:
        return f"{best.heads}: {path}"
    if best.mapping_gain is not None:
        return "leave them alone: no mapping that fits is predicted to have faster steps than heads in runs"
    return "placed only where caches are compressed, on several tensor-parallel ranks alone and on the accelerator"


def _values(
    arguments: argparse.Namespace,
    machine: Hardware,
    demand: Demand,
    planner: ClusterPlanner,
    found: Plan,
    config: dict[str, Any],
) -> dict[str, Any]:
    def choice_values(choice: Choice) -> dict[str, Any]:
        return asdict(replace(choice, mapping=None)) | {
            "name": str(choice),
            "mapping": choice.mapping is not None,
            "heads": choice.heads,
            "exact": choice.fit.exact,
            "memory_bytes": choice.memory.total,
            "sent_bytes": planner.sent_bytes(demand, choice),
            "prompt_tokens_per_s": choice.prompt_tokens_per_s(demand),
            "new_tokens_per_s": choice.new_tokens_per_s(demand),
        }

    choices = [choice_values(choice) for choice in found.choices]
    return {
        "format": "megakv plan",
        "model": arguments.model,
        "hardware": machine.spec.model_dump(mode="json"),
        "demand": asdict(demand),
        "best": choices[0] | {"config": config},
        "choices": choices,
        "rejected": [asdict(rejection) for rejection in found.rejected],
        "evaluated": found.evaluated,
    }


def _show(
    arguments: argparse.Namespace, machine: Hardware, demand: Demand, planner: ClusterPlanner, found: Plan
) -> None:
    print(
        f"{Path(arguments.model).name} on {demand.gpus:,} x {machine.spec.name} ({planner.room / GB:.1f} GB usable "
        f"each): {demand.context:,} new tokens behind {demand.cached:,}, batch {demand.batch}"
    )
    print(f"\n{'':>2} {'choice':<42} {'replicas':>8} {'TTFT':>9} {'TTIT':>9} {'prompt tok/s':>13} {'GB a rank':>10}")
    for number, choice in enumerate(found.choices[:SHOWN], 1):
        print(
            f"{number:>2} {str(choice):<42} {choice.mesh.replicas:>8,} {choice.ttft_s:>7.3g} s "
            f"{choice.ttit_s * 1e3:>6.3g} ms {choice.prompt_tokens_per_s(demand):>13,.0f} "
            f"{choice.memory.total / GB:>10.1f}" + (f"  {choice.heads}" if choice.heads else "")
        )
        if arguments.explain:
            print(f"   {_explained(choice, planner.sent_bytes(demand, choice))}")
    hidden = len(found.choices) - SHOWN
    if hidden > 0:
        print(f"   and {hidden} slower ones")
    shown = found.rejected if arguments.explain else found.rejected[-SHOWN:]
    if shown:
        print("\nrejected:")
    for rejection in shown:
        print(f"   {rejection.what}: {rejection.why}")
    if len(shown) < len(found.rejected):
        print(f"   and {len(found.rejected) - len(shown)} more: --explain lists them")


def _explained(choice: Choice, sent: dict[str, int]) -> str:
    terms = ", ".join(f"{name.replace('_', '-')} {seconds:.3g} s" for name, seconds in choice.terms.items())
    memory = choice.memory
    host = f", of the host {memory.host / GB:.1f} GB" if memory.host else ""
    host += f", on disk {memory.disk / GB:.1f} GB" if memory.disk else ""
    total = sum(sent.values())
    shown = {name: nbytes for name, nbytes in sent.items() if nbytes >= LEAST_SHARE * total}
    parts = ", ".join(f"{name.replace('_', '-')} {nbytes / GB:.3g}" for name, nbytes in shown.items())
    sends = f"; a rank sends {total / GB:.3g} GB ({parts})" if sent else ""
    return (
        f"{terms}; decode {choice.decode}; memory: weights {memory.weights / GB:.1f}, KV {memory.cache / GB:.1f}, "
        f"activations {memory.working / GB:.1f} GB{host}{sends}"
    )
