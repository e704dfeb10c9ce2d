"""``megakv simulate``: a run on paper, with the timeline, the trace and the report of a real one."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakv.tracking.files import check_outputs, write_whole

if TYPE_CHECKING:
    from megakv.costmodel.presets import Hardware
    from megakv.costmodel.shape import ModelShape
    from megakv.costmodel.simulation import Disturbances

METHODS = ("pass_kv", "pass_q", "all_gather", "tsp", "tsp_causal", "runahead")
CHUNK_TOKENS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--model", required=True, help="folder, config.json, recipe or hub id; no weights are read")
    parser.add_argument(
        "--context", type=int, required=True, help="new tokens of every sequence; cached ones if offload"
    )
    parser.add_argument("--cached", type=int, default=0, help="tokens of every sequence cached before (default 0)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument(
        "--method",
        choices=(*METHODS, "tp", "offload"),
        required=True,
        help="how a prompt is read; tp: by tensor parallelism alone; offload: decoding behind --context and --cached "
        "tokens in host memory",
    )
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks (default 1)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each (default 1)")
    parser.add_argument("--hardware", required=True, help="a known machine, or a JSON that megakv profile wrote")
    parser.add_argument("--partition", type=float, nargs="+", help="runahead: share of every rank (default: balanced)")
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS, help="runahead: tokens of a message")
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--weights-too", action="store_true", help="offload: weights come over the same link")
    parser.add_argument(
        "--host-gb",
        type=float,
        help="offload: GiB of host memory of a rank; what is beyond lies on disk (default: none)",
    )
    parser.add_argument("--steps", type=int, default=4, help="offload: decoded tokens (default 4)")
    parser.add_argument("--slow-rank", action="append", default=[], metavar="R:FACTOR", help="computes so much longer")
    parser.add_argument("--slow-link", action="append", default=[], metavar="A-B:FACTOR", help="carries so much longer")
    parser.add_argument("--noise", type=float, default=0.0, help="sigma of the log-normal factor of every task")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--png", help="draw the timeline to this file")
    parser.add_argument("--trace", help="write a trace for chrome://tracing or Perfetto to this file")
    parser.add_argument("--json", help="write the report, as of a real run, to this file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play a run through, event by event: slow ranks, slow links and noise included."""
    from tqdm import tqdm

    from megakv.costmodel.memory import GIB
    from megakv.costmodel.presets import hardware
    from megakv.planner.virtual_runs import VirtualRun
    from megakv.tracking.report import report_to_json
    from megakv.tracking.timeline import draw_timelines, write_trace

    begun = time.perf_counter()
    check_outputs({f"--{name}": getattr(arguments, name) for name in ("png", "trace", "json")})
    machine = hardware(arguments.hardware, setting="--hardware")
    disturbances, model = _disturbances(arguments), _model(arguments, machine)
    new, cached = (arguments.context,) * arguments.batch, (arguments.cached,) * arguments.batch
    with tqdm(desc="simulate", unit="task", leave=False, delay=1.0) as bar:
        run = VirtualRun(
            machine, model, new, cached, arguments.cp, arguments.tp, disturbances,
            progress=lambda ended: bar.update(ended - bar.n),
        )  # fmt: skip
        if arguments.method == "offload":
            host_bytes = None if arguments.host_gb is None else int(arguments.host_gb * GIB)
            found = run.decoding(steps=arguments.steps, weights_too=arguments.weights_too, host_bytes=host_bytes)
        else:
            method = "pass_kv" if arguments.method == "tp" else arguments.method
            found = run.prefill(method, fractions=arguments.partition, chunk_tokens=arguments.chunk_tokens)
    given = {name: value for name, value in vars(arguments).items() if not callable(value)}
    report = run.report(
        found,
        model=Path(arguments.model).name,
        config={"simulated": given},
        machine={"simulated": machine.spec.name},
        dtype=machine.spec.dtype,
        methods={} if arguments.method == "offload" else {"prefill": {arguments.method: len(model.layers)}},
    )
    if arguments.png:
        draw_timelines([report], arguments.png)
    if arguments.trace:
        write_trace(report, arguments.trace)
    if arguments.json:
        write_whole(arguments.json, report_to_json(report).encode())
    return {
        "method": arguments.method,
        "ttft_s": report.ttft_s,
        "ttit_s": report.ttit_s,
        "closed_form_s": found.predicted_s,
        "waiting_share": [
            round(sum(e.end - e.start for e in rank.events if e.kind == "wait") / found.played.seconds, 4)
            for rank in report.ranks
        ],
        "bytes_sent": {
            name: sum(rank.bytes_sent.get(name, 0) for rank in report.ranks)
            for name in sorted({name for rank in report.ranks for name in rank.bytes_sent})
        },
        "tasks": found.played.tasks,
        "simulated_in_s": time.perf_counter() - begun,
        **{name: getattr(arguments, name) for name in ("png", "trace", "json") if getattr(arguments, name)},
    }


def _model(arguments: argparse.Namespace, machine: Hardware) -> ModelShape:
    import torch

    from megakv.launcher.model_names import model_shape
    from megakv.planner.choices import MOST_TOKENS, tp_sizes

    for name in ("context", "cached", "batch", "cp", "tp", "chunk_tokens", "steps"):
        low, value = int(name != "cached"), getattr(arguments, name)
        if not low <= value <= MOST_TOKENS:
            raise ValueError(f"--{name.replace('_', '-')} {value}: allowed: {low} to {MOST_TOKENS:,}")
    model = model_shape(arguments.model, dtype=getattr(torch, machine.spec.dtype))
    sizes = tp_sizes(model, model.heads)
    if arguments.tp not in sizes:
        raise ValueError(f"--tp {arguments.tp}: allowed for this model: {', '.join(map(str, sizes))}")
    if arguments.host_gb is not None and not (arguments.method == "offload" and 0 < arguments.host_gb < math.inf):
        raise ValueError(f"--host-gb {arguments.host_gb:g}: allowed: more than 0, with --method offload")
    if arguments.method == "tp" and arguments.cp > 1:
        raise ValueError(f"--cp {arguments.cp} with --method tp: allowed: 1")
    if arguments.layers is not None:
        if not 1 <= arguments.layers <= len(model.layers):
            raise ValueError(f"--layers {arguments.layers}: allowed: 1 to {len(model.layers)}")
        model = replace(model, layers=model.layers[: arguments.layers])
    return model


def _disturbances(arguments: argparse.Namespace) -> Disturbances:
    from megakv.costmodel.simulation import Disturbances

    ranks = _slowed("--slow-rank", "R:FACTOR", arguments.slow_rank)
    links = _slowed("--slow-link", "A-B:FACTOR", arguments.slow_link)
    return Disturbances(
        slow_ranks={rank: factor for (rank,), factor in ranks.items()},
        slow_links={(first, second): factor for (first, second), factor in links.items()},
        noise=arguments.noise,
        seed=arguments.seed,
    )


def _slowed(option: str, form: str, texts: list[str]) -> dict[tuple[int, ...], float]:
    """Factors by the rank, or the two ranks, that they are given for."""
    found = {}
    for text in texts:
        names, _, factor = text.rpartition(":")
        try:
            ranks = tuple(map(int, names.split("-")))
            if len(ranks) != form.count("-") + 1:
                raise ValueError
            found[ranks] = float(factor)
        except ValueError:
            example = "1-2:3.5" if "-" in form else "1:2.5"
            raise ValueError(f"{option} {text}: allowed: {form}, as in {example}") from None
    return found
