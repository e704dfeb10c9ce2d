"""Tokens per second with weights and keys and values off the accelerator: column by column against row by row.

Row by row, a large batch is decoded in several calls, each of which brings all weights for itself. Column by column it
is one call, whose groups share every layer's weights. The link is emulated: a thread makes real copies, paced to each
bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.arguments import check_positive

ROW, COLUMN = ("row stream", "row auto"), ("column stream", "column kvpr", "column chunked", "column auto")
METHODS = (*ROW, *COLUMN)
QUICK = {"layers": 3, "repeats": 2, "links": "0.2,0.6", "new": 9, "prompt": 256}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="decoder layers (default 6)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default 512)")
    parser.add_argument("--heads", type=int, default=8, help="query heads (default 8)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of all groups (default 8)")
    parser.add_argument("--groups", type=int, default=4, help="num_gpu_batches (default 4)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt (default 512)")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate (default 16)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk of activations (default 256)")
    parser.add_argument("--links", default="0.05,0.1,0.2,0.4", help="bandwidths in GB/s (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="generations by each method (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default 1)")
    parser.add_argument("--quick", action="store_true", help="a smaller run, of at most five minutes")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        given = set(sys.argv[1:] if argv is None else argv)
        for name, value in QUICK.items():
            if f"--{name}" not in given:
                setattr(arguments, name, value)
    check_positive(
        parser, arguments, "layers", "hidden", "heads", "batch", "groups", "prompt", "chunk", "repeats", "threads"
    )
    try:
        arguments.links = [float(link) for link in arguments.links.split(",")]
    except ValueError:
        arguments.links = [0.0]
    if min(arguments.links) <= 0:
        parser.error("--links: allowed: numbers above 0, separated by commas")
    if arguments.new < 6:
        parser.error(f"--new {arguments.new}: allowed: 6 or more, as the first steps are left out")
    if arguments.batch % arguments.groups:
        parser.error(f"--batch {arguments.batch}: allowed: multiples of --groups {arguments.groups}")
    if arguments.hidden % (2 * arguments.heads):
        parser.error(f"--hidden {arguments.hidden}: allowed: even multiples of --heads {arguments.heads}")
    return arguments


def measure(arguments: argparse.Namespace, link_gb_s: float) -> list[dict[str, Any]]:
    """All methods over one link, in turns."""
    import torch
    from harness.models import random_ids
    from harness.offloads import Decoder, random_model

    sizes = {"layers": arguments.layers, "hidden": arguments.hidden, "heads": arguments.heads}
    model = random_model("opt", positions=arguments.prompt + arguments.new, **sizes)
    ids = random_ids(512, arguments.prompt, torch.device("cpu"), arguments.batch)
    common = {"link_gb_s": link_gb_s, "chunk_tokens": arguments.chunk, "weights": True}
    decoders, shares = {}, {}
    for name in METHODS:
        schedule, method = name.split()
        column = schedule == "column"
        decoders[name] = Decoder(method, model, num_gpu_batches=arguments.groups if column else 1, **common)
        shares[name] = [ids] if column else list(ids.chunk(arguments.groups))
    plain = Decoder("in_memory", model, link_gb_s=link_gb_s, chunk_tokens=arguments.chunk)
    expected = plain.generate(ids, arguments.new).tokens
    plain.close()
    samples: dict[str, list[list[Any]]] = {name: [] for name in METHODS}
    for _ in range(arguments.repeats):
        for name, decoder in decoders.items():
            samples[name].append([decoder.generate(share, arguments.new) for share in shares[name]])
    rows = []
    for name, found in samples.items():
        # A step of the whole batch: row by row, one of every call.
        seconds = [sum(statistics.median(sample.seconds) for sample in each) for each in found]
        steps = [step for each in found for sample in each for step in sample.steps]
        rows.append(
            {
                "link_gb_s": link_gb_s,
                "method": name,
                "seconds": seconds,
                "tokens_per_s": arguments.batch / statistics.median(seconds),
                "bytes_in": statistics.median(sum(sample.bytes_in for sample in each) for each in found),
                "weight_bytes": statistics.median(step.weight_bytes for step in steps) * len(shares[name]),
                "prediction_errors": [abs(step.measured_s / step.predicted_s - 1) for step in steps],
                "split_points": [[step.cached, step.division.recomputed] for step in found[-1][0].steps],
                "staging_bytes": decoders[name].staging_bytes,
                "tokens_equal": all(torch.equal(torch.cat([s.tokens for s in each]), expected) for each in found),
            }
        )
        rows[-1]["link_utilisation"] = rows[-1]["bytes_in"] / (link_gb_s * 1e9) / statistics.median(seconds)
        decoders[name].close()
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether tokens agree, what columns gain over rows and over streaming, and how far predictions were off."""
    over_row, over_stream = {}, {}
    for link in dict.fromkeys(row["link_gb_s"] for row in rows):
        found = {row["method"]: statistics.median(row["seconds"]) for row in rows if row["link_gb_s"] == link}
        over_row[f"{link:g} GB/s"] = {method: found["row stream"] / found[method] for method in METHODS}
        over_stream[f"{link:g} GB/s"] = {method: found["column stream"] / found[method] for method in COLUMN}
    errors = {
        method: [e for row in rows if row["method"] == method for e in row["prediction_errors"]] for method in METHODS
    }
    return {
        "link": "emulated",
        "tokens_equal": all(row["tokens_equal"] for row in rows),
        "speedup_over_row_stream": over_row,
        "speedup_over_column_stream": over_stream,
        "prediction_median_error": statistics.median(error for each in errors.values() for error in each),
        "prediction_median_error_by_method": {method: statistics.median(each) for method, each in errors.items()},
    }


def show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print a table of the results."""
    from harness.report import align

    lines = [["link, method", "ms/step", "tokens/s", "MB in", "of it weights", "link", "MB on device", "error", "l/s'"]]
    for row in rows:
        last = row["split_points"][-1]
        lines.append(
            [
                f"{row['link_gb_s']:g} GB/s {row['method']}",
                f"{1e3 * statistics.median(row['seconds']):.1f}",
                f"{row['tokens_per_s']:.1f}",
                f"{row['bytes_in'] / 1e6:.1f}",
                f"{row['weight_bytes'] / 1e6:.1f}",
                f"{row['link_utilisation']:.0%}",
                f"{row['staging_bytes'] / 1e6:.1f}",
                f"{statistics.median(row['prediction_errors']):.1%}",
                f"{last[1]}/{last[0]}",
            ]
        )
    print(f"\nThe link is emulated: real copies, paced. A step is one token of the whole batch.\n\n{align(lines)}\n")
    print(
        f"tokens equal: {summary['tokens_equal']}; median error of predictions: "
        f"{summary['prediction_median_error']:.1%}\n"
    )


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
        for link in arguments.links:
            rows += measure(arguments, link)
        dist.destroy_process_group()
    summary = summarise(rows)
    show(rows, summary)
    if arguments.json:
        path = Path(arguments.json)
        write_report(path, benchmark="columns", machine=machine, arguments=arguments, rows=rows, summary=summary)
    return 0 if summary["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
