"""The command lines of benchmarks; the process that only starts the ranks reads them too: nothing heavy is imported."""

from __future__ import annotations

import argparse

DTYPES = ("fp32", "bf16", "fp16")
SHAPE = (
    ("layers", 8, "decoder layers"),
    ("hidden", 1024, "hidden size"),
    ("heads", 16, "query heads"),
    ("kv-heads", 4, "key-value heads"),
    ("intermediate", 2816, "width of the MLP"),
    ("vocab", 32000, "vocabulary"),
)


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark takes: its ranks, and where the results go."""
    parser.add_argument("--ranks", type=int, required=True, help="processes to start on this machine")
    parser.add_argument("--threads", type=int, default=1, help="threads of every rank (default 1)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which all is ended (default 3600)")
    parser.add_argument("--json", metavar="FILE", help="write the results here, and a chart (PNG) beside it")


def check_rank_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message if one of them is impossible."""
    check_positive(parser, arguments, "ranks", "threads", "timeout")


def add_model_arguments(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """The shape of the Llama that is measured; a benchmark may have defaults of its own (``kv_heads=16``)."""
    for name, value, text in SHAPE:
        value = defaults.get(name.replace("-", "_"), value)
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights and activations (default fp32)")


def check_model_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message if the shape is impossible."""
    check_positive(parser, arguments, *(name for name, _, _ in SHAPE))
    if arguments.hidden % (2 * arguments.heads):
        parser.error(f"--hidden {arguments.hidden} is no multiple of twice --heads {arguments.heads}")
    if arguments.heads % arguments.kv_heads:
        parser.error(f"--heads {arguments.heads} is no multiple of --kv-heads {arguments.kv_heads}")


def check_positive(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *names: str) -> None:
    """End with a message if one of these is not above 0."""
    for name in names:
        value = getattr(arguments, name.replace("-", "_"))
        if value <= 0:
            parser.error(f"--{name} {value}: allowed: above 0")
