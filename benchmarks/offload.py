"""Time per generated token with keys and values off the accelerator: KVPR, its chunked form, streaming, transformers.

Without an accelerator the link is emulated: a thread makes real copies, paced to each bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.arguments import check_positive

if TYPE_CHECKING:
    from harness.offloads import Sample

CHOICES = ("stream", "kvpr", "chunked", "cpu_rank")
"""What `auto` chooses from."""
QUICK = {"layers": 4, "repeats": 2, "links": "0.1,0.4", "new": 14}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="decoder layers (default 6)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default 512)")
    parser.add_argument("--heads", type=int, default=8, help="query heads (default 8)")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default 4)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt (default 256)")
    parser.add_argument("--new", type=int, default=24, help="tokens to generate (default 24)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a chunk of activations (default 128)")
    parser.add_argument("--links", default="0.05,0.1,0.2,0.4", help="bandwidths in GB/s (default %(default)s)")
    parser.add_argument("--shapes", default="opt,gqa", help="models to run (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="generations by each method (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default 1)")
    parser.add_argument("--quick", action="store_true", help="a smaller run, of at most five minutes")
    parser.add_argument("--json", metavar="FILE", help="write the results here, and a chart (PNG) beside it")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        given = set(sys.argv[1:] if argv is None else argv)
        for name, value in QUICK.items():
            if f"--{name}" not in given:
                setattr(arguments, name, value)
    check_positive(parser, arguments, "layers", "hidden", "heads", "batch", "prompt", "chunk", "repeats", "threads")
    try:
        arguments.links = [float(link) for link in arguments.links.split(",")]
    except ValueError:
        arguments.links = [0.0]
    if min(arguments.links) <= 0:
        parser.error("--links: allowed: numbers above 0, separated by commas")
    arguments.shapes = arguments.shapes.split(",")
    if set(arguments.shapes) - {"opt", "gqa"}:
        parser.error(f"--shapes {','.join(arguments.shapes)}: allowed: opt, gqa")
    if arguments.new < 6:
        parser.error(f"--new {arguments.new}: allowed: 6 or more, as the first steps are left out")
    if arguments.heads % 4 or arguments.hidden % (2 * arguments.heads):
        parser.error(f"--heads {arguments.heads}: allowed: multiples of 4 of which --hidden is an even multiple")
    return arguments


def row_of(method: str, samples: Sequence[Sample], *, shape: str, link_gb_s: float, batch: int) -> dict[str, Any]:
    """What all generations of one method came to."""
    steps = [step for sample in samples for step in sample.steps]
    seconds = [statistics.median(sample.seconds) for sample in samples]
    row: dict[str, Any] = {
        "shape": shape,
        "link_gb_s": link_gb_s,
        "method": method,
        "seconds": seconds,
        "tokens_per_s": batch / statistics.median(seconds),
        "bytes_in": statistics.mean(sample.bytes_in for sample in samples),
        "bytes_out": statistics.mean(sample.bytes_out for sample in samples),
    }
    row["link_utilisation"] = row["bytes_in"] / (link_gb_s * 1e9) / statistics.median(seconds)
    if steps:
        row["compute_utilisation"] = statistics.median(1 - step.waited_s / step.measured_s for step in steps)
        row["prediction_errors"] = [abs(step.measured_s / step.predicted_s - 1) for step in steps]
        row["predicted_s"] = statistics.median(step.predicted_s for step in steps)
        row["split_points"] = [[step.cached, step.division.recomputed] for step in samples[-1].steps]
    return row


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether tokens agree, how `auto` compares with the best it could choose, and how far predictions were off."""
    auto_over_best, over_stream, over_transformers = {}, {}, {}
    errors = [error for row in rows for error in row.get("prediction_errors", ())]
    for shape, link in dict.fromkeys((row["shape"], row["link_gb_s"]) for row in rows):
        found = {
            row["method"]: statistics.median(row["seconds"])
            for row in rows
            if (row["shape"], row["link_gb_s"]) == (shape, link)
        }
        name = f"{shape} {link:g} GB/s"
        auto_over_best[name] = found["auto"] / min(found[method] for method in CHOICES)
        over_stream[name] = {method: found["stream"] / found[method] for method in (*CHOICES[1:], "auto")}
        over_transformers[name] = found["transformers"] / found["auto"]
    return {
        "link": "emulated",
        "tokens_equal": all(row["tokens_equal"] for row in rows),
        "auto_over_best": max(auto_over_best.values()),
        "auto_over_best_by_case": auto_over_best,
        "prediction_median_error": statistics.median(errors),
        "speedup_over_stream": over_stream,
        "speedup_of_auto_over_transformers": over_transformers,
    }


def show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print tables of the results."""
    from harness.report import align

    lines = [["model, link, method", "ms/step", "predicted", "tokens/s", "MB in", "MB out", "link", "compute", "l/s'"]]
    for row in rows:
        last = row["split_points"][-1] if "split_points" in row else None
        lines.append(
            [
                f"{row['shape']} {row['link_gb_s']:g} GB/s {row['method']}",
                f"{1e3 * statistics.median(row['seconds']):.1f}",
                f"{1e3 * row['predicted_s']:.1f}" if "predicted_s" in row else "-",
                f"{row['tokens_per_s']:.1f}",
                f"{row['bytes_in'] / 1e6:.2f}",
                f"{row['bytes_out'] / 1e6:.3f}",
                f"{row['link_utilisation']:.0%}",
                f"{row['compute_utilisation']:.0%}" if "compute_utilisation" in row else "-",
                f"{last[1]}/{last[0]}" if last else "-",
            ]
        )
    print(f"\nThe link is emulated: real copies, paced.\n\n{align(lines)}\n")
    print(
        f"tokens equal: {summary['tokens_equal']}; auto over the best of its choices, at worst: "
        f"{summary['auto_over_best']:.3f}; median error of predictions: {summary['prediction_median_error']:.1%}\n"
    )


def draw(path: Path, rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Draw the times per step of the first model over the bandwidths, and its split points."""
    from harness.lines import Line, draw_lines
    from harness.statistics import Interval, median

    shape = arguments.shapes[0]
    size = f"{shape}, {arguments.layers} layers of {arguments.hidden}, batch {arguments.batch}"
    mine = [row for row in rows if row["shape"] == shape]
    lines = []
    for method in dict.fromkeys(row["method"] for row in mine):
        chosen = [row for row in mine if row["method"] == method]
        times = [median(row["seconds"]).scaled(1e3) for row in chosen]
        lines.append(Line(method, [1e3 * row["link_gb_s"] for row in chosen], times, dashed=method == "in_memory"))
    draw_lines(
        path.with_suffix(".png"),
        lines,
        title="Decoding with keys and values in host memory",
        subtitle=f"{size}, {arguments.prompt} tokens each, fp32, CPU; the link is emulated; median, 95% interval",
        x_label="bandwidth of the emulated link, MB/s",
        y_label="milliseconds per step",
        log_y=True,
    )
    points = []
    for row in mine:
        if row["method"] in ("kvpr", "chunked") and row["link_gb_s"] == arguments.links[0]:
            shares = [Interval(split, split, split) for _, split in row["split_points"]]
            points.append(Line(row["method"], [cached for cached, _ in row["split_points"]], shares))
    draw_lines(
        path.with_name(f"{path.stem}_split.png"),
        points,
        title="Tokens recomputed from activations, step by step",
        subtitle=f"{size}, emulated link of {arguments.links[0]:g} GB/s",
        x_label="cached tokens",
        y_label="split point l, all sequences",
    )


def measure(arguments: argparse.Namespace, shape: str, link_gb_s: float) -> list[dict[str, Any]]:
    """All methods over one link, in turns."""
    import torch
    from harness.models import random_ids
    from harness.offloads import METHODS, Decoder, random_model

    positions = arguments.prompt + arguments.new
    model = random_model(
        shape, layers=arguments.layers, hidden=arguments.hidden, heads=arguments.heads, positions=positions
    )
    ids = random_ids(512, arguments.prompt, torch.device("cpu"), arguments.batch)
    decoders = [Decoder(name, model, link_gb_s=link_gb_s, chunk_tokens=arguments.chunk) for name in METHODS]
    samples: dict[str, list[Sample]] = {decoder.method: [] for decoder in decoders}
    for _ in range(arguments.repeats):
        for decoder in decoders:
            samples[decoder.method].append(decoder.generate(ids, arguments.new))
    expected = samples[METHODS[0]][0].tokens
    rows = []
    for decoder in decoders:
        own = samples[decoder.method]
        row = row_of(decoder.method, own, shape=shape, link_gb_s=link_gb_s, batch=arguments.batch)
        row["tokens_equal"] = all(torch.equal(sample.tokens, expected) for sample in own)
        row["staging_bytes"] = decoder.staging_bytes
        rows.append(row)
        decoder.close()
    return rows


def main() -> int:
    """Entry of the only process."""
    arguments = parse_arguments()
    import torch
    import torch.distributed as dist
    from harness.report import describe_machine, write_report

    from megakv.launcher.voice import quiet_libraries

    quiet_libraries()
    machine = describe_machine()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        for shape in arguments.shapes:
            for link in arguments.links:
                rows += measure(arguments, shape, link)
        dist.destroy_process_group()
    summary = summarise(rows)
    show(rows, summary)
    if arguments.json:
        path = Path(arguments.json)
        write_report(path, benchmark="offload", machine=machine, arguments=arguments, rows=rows, summary=summary)
        draw(path, rows, arguments)
    return 0 if summary["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
