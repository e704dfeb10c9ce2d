"""The command lines of benchmarks; the process that only starts the ranks reads them too: nothing heavy is imported."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

DTYPES = ("fp32", "bf16", "fp16")
SHAPE = (
    ("layers", 8, "decoder layers"),
    ("hidden", 1024, "hidden size"),
    ("heads", 16, "query heads"),
    ("kv-heads", 4, "key-value heads"),
    ("intermediate", 2816, "width of the MLP"),
    ("vocab", 32000, "vocabulary"),
)


def add_rank_arguments(parser: argparse.ArgumentParser, *, timeout_s: float = 3600) -> None:
    """What every benchmark takes: its ranks, how long it may take (by default an hour), and where the results go."""
    parser.add_argument("--ranks", type=int, required=True, help="processes to start on this machine")
    parser.add_argument("--threads", type=int, default=1, help="threads of every rank (default 1)")
    parser.add_argument(
        "--timeout", type=float, default=timeout_s, help=f"seconds after which all is ended (default {timeout_s:g})"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results here, and a chart (PNG) beside it")


def check_rank_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message if one of them is impossible."""
    check_positive(parser, arguments, "ranks", "threads", "timeout")


def add_profile_argument(parser: argparse.ArgumentParser, seconds: float = 0.0) -> None:
    """How long a hardware profile is measured first, so that the cost model's predictions stand in the results."""
    parser.add_argument(
        "--profile-seconds",
        type=float,
        default=seconds,
        help="measure a hardware profile for so long, and predict every method; 0: no predictions "
        f"(default {seconds:g})",
    )


def check_profile_argument(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message if it is impossible."""
    if arguments.profile_seconds < 0:
        parser.error(f"--profile-seconds {arguments.profile_seconds:g}: allowed: 0 or more")


def add_model_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = (), **defaults: int) -> None:
    """The shape of the Llama that is measured; a benchmark may have defaults of its own (``kv_heads=16``)."""
    for name, value, text in SHAPE:
        if name in without:
            continue
        value = defaults.get(name.replace("-", "_"), value)
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights and activations (default fp32)")


def check_model_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message if the shape is impossible."""
    several = isinstance(arguments.kv_heads, list)
    check_positive(parser, arguments, *(name for name, _, _ in SHAPE if not (several and name == "kv-heads")))
    if arguments.hidden % (2 * arguments.heads):
        parser.error(f"--hidden {arguments.hidden} is no multiple of twice --heads {arguments.heads}")
    for kv_heads in arguments.kv_heads if several else [arguments.kv_heads]:
        if arguments.heads % kv_heads:
            parser.error(f"--heads {arguments.heads} is no multiple of --kv-heads {kv_heads}")


def check_positive(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *names: str) -> None:
    """End with a message if one of these is not above 0."""
    for name in names:
        value = getattr(arguments, name.replace("-", "_"))
        if value <= 0:
            parser.error(f"--{name} {value}: allowed: above 0")


def whole_numbers(parser: argparse.ArgumentParser, name: str, text: str) -> list[int]:
    """What a list such as ``1,4`` holds, ascending, each once; ends with a message if one is below 1."""
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        parser.error(f"{name} {text}: allowed: whole numbers from 1 on, separated by commas")
    return numbers


def method_names(
    parser: argparse.ArgumentParser, text: str, allowed: Sequence[str], *, name: str = "--methods"
) -> list[str]:
    """What a list such as --methods holds; ends with a message if one of them is not allowed or comes twice."""
    names = text.split(",")
    if set(names) - set(allowed) or len(set(names)) < len(names):
        parser.error(f"{name} {text}: allowed: each of {', '.join(allowed)} once")
    return names


def check_kv_shards(
    parser: argparse.ArgumentParser, kv_heads: int, ranks: int, remedy: str = "take other numbers"
) -> None:
    """End with a message if DeepSpeed's tensor parallelism would give some of so many ranks no KV head."""
    if kv_heads % ranks:
        parser.error(
            f"--kv-heads {kv_heads} is no multiple of {ranks} ranks: DeepSpeed's tensor parallelism would leave ranks "
            f"without heads; {remedy}"
        )
