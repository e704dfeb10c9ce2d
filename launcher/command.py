"""The ``megakv`` command: tools that need no ranks, and measurements that start their own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from megakv.errors import MegaKVError


def info(arguments: argparse.Namespace) -> dict[str, Any]:
    """This machine, the versions in use, and the methods to choose from."""
    from megakv.attention.choice import DECODE, PREFILL
    from megakv.injection.policy import POLICIES
    from megakv.tracking import machine_info, version_info

    return {
        "machine": machine_info(),
        "versions": version_info(),
        "prefill": ["auto", *PREFILL],
        "decode": ["auto", *DECODE],
        "model types with a policy": sorted(POLICIES),
    }


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read a run's JSON and say how many ranks it wants."""
    from megakv.config import load_config

    config = load_config(arguments.config)
    return {
        "config": arguments.config,
        "ranks": config.cp_size * config.tp_size,
        "context_parallel": config.cp_size,
        "tensor_parallel": config.tp_size,
        "settings": config.megakv.model_dump(mode="json", by_alias=True),
    }


def timeline(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw a run's report, as a picture and as a trace for chrome://tracing or Perfetto."""
    from megakv.tracking import draw_beside, draw_timeline, load_report, write_trace

    report = load_report(arguments.report)
    if arguments.beside:
        draw_beside([report, load_report(arguments.beside)], arguments.png)
    else:
        draw_timeline(report, arguments.png)
    written = {"png": arguments.png}
    if arguments.trace:
        write_trace(report, arguments.trace)
        written["trace"] = arguments.trace
    return written


def profile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure this machine's compute, memory and links once, for the choice of methods."""
    from megakv.costmodel.hardware import load_profile
    from megakv.launcher.hardware import summary

    _measure("hardware.py", arguments, ["threads", "dtype", "tp", "seconds", "json", "model"])
    return summary(load_profile(arguments.json, setting="--json"))


def fit_policy(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time pass-KV against pass-Q at many (T, P) and fit the rule of the policy ``fitted``."""
    from megakv.costmodel.policy_fit import load_fit
    from megakv.launcher.fit import check_tokens, summary

    check_tokens(arguments.tokens, arguments.ranks // max(1, arguments.tp))
    _measure("fit.py", arguments, ["threads", "dtype", "tp", "seconds", "json", "model", "tokens"])
    return summary(load_fit(arguments.json, setting="--json"))


def search_partition(arguments: argparse.Namespace) -> None:
    """Search on real ranks for the partitions with which KV-Runahead is fastest, and keep them in a lookup table."""
    from megakv.launcher.ranks import command_line, start_ranks
    from megakv.launcher.search_arguments import check_search, journal_path, search_config

    config = search_config(arguments, arguments.ranks)
    check_search(arguments, config)
    names = ["model", "config", "contexts", "table", "profile", "threads", "step", "patience", "repeats", "png"]
    words = command_line(arguments, names) + ["--full-grid"] * arguments.full_grid
    try:
        start_ranks("search.py", config.cp_size * config.tp_size, arguments.threads, words)
    except KeyboardInterrupt:
        print(
            f"megakv: stopped; what was measured is in {journal_path(arguments)}: the same command goes on from there",
            file=sys.stderr,
        )
        raise


def fairkv_profile(arguments: argparse.Namespace) -> None:
    """Run a model over prompts with compression and write what every KV head keeps."""
    from megakv.launcher.budget_arguments import budget_config, check_budgets
    from megakv.launcher.ranks import command_line, start_ranks

    config = budget_config(arguments, arguments.ranks)
    check_budgets(arguments)
    names = ["model", "prompts", "json", "png", "config", "method", "budget", "field", "threads"]
    words = command_line(arguments, names) + ["--no-chat-template"] * arguments.no_chat_template
    start_ranks("budgets.py", config.cp_size * config.tp_size, arguments.threads, words)


def _measure(script: str, arguments: argparse.Namespace, names: list[str]) -> None:
    from megakv.launcher.hardware import layer_shape
    from megakv.launcher.ranks import check_rank_arguments, command_line, start_ranks

    check_rank_arguments(arguments, arguments.ranks)
    if arguments.model:
        layer_shape(arguments)
    start_ranks(script, arguments.ranks, arguments.threads, command_line(arguments, names))


def _describe(
    commands: Any, function: Callable[[argparse.Namespace], dict[str, Any] | None]
) -> argparse.ArgumentParser:
    summary = (function.__doc__ or "").splitlines()[0]
    command: argparse.ArgumentParser = commands.add_parser(
        function.__name__.replace("_", "-"), help=summary, description=summary
    )
    command.set_defaults(function=function, ranks_write=False)
    return command


def _parser() -> argparse.ArgumentParser:
    from megakv.launcher.budget_arguments import add_budget_arguments
    from megakv.launcher.dry_run import add_dry_run_arguments, dry_run
    from megakv.launcher.fairkv import add_map_arguments, fairkv_map
    from megakv.launcher.fit import add_fit_arguments
    from megakv.launcher.hardware import add_profile_arguments
    from megakv.launcher.plan import add_plan_arguments, plan
    from megakv.launcher.report import add_report_arguments, report
    from megakv.launcher.search_arguments import add_search_arguments
    from megakv.launcher.simulation import add_simulate_arguments, simulate

    parser = argparse.ArgumentParser(prog="megakv", description="Long-context inference: its tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    _describe(commands, info)
    _describe(commands, check).add_argument("config", help="the JSON of a run")
    drawing = _describe(commands, timeline)
    drawing.add_argument("report", help="a report that megakv.tracking.json wrote")
    drawing.add_argument("png", help="picture to write")
    drawing.add_argument("--trace", help="trace to write")
    drawing.add_argument("--beside", help="another report to draw below, on the same axis of time")
    add_report_arguments(_describe(commands, report))
    for command in commands.choices.values():
        command.add_argument("--json", help="write the result to this file")
    for function, add_arguments in ((profile, add_profile_arguments), (fit_policy, add_fit_arguments)):
        measuring = _describe(commands, function)
        measuring.add_argument("--ranks", type=int, default=2, help="processes to start on this machine (default 2)")
        add_arguments(measuring)
        measuring.set_defaults(ranks_write=True)
    searching = _describe(commands, search_partition)
    searching.add_argument("--ranks", type=int, help="processes to start here (default: as many as the JSON wants)")
    add_search_arguments(searching)
    searching.set_defaults(ranks_write=True)
    budgeting = _describe(commands, fairkv_profile)
    budgeting.add_argument("--ranks", type=int, help="processes to start here (default: as many as the JSON wants)")
    add_budget_arguments(budgeting)
    budgeting.set_defaults(ranks_write=True)
    planning, simulating = _describe(commands, plan), _describe(commands, simulate)
    add_plan_arguments(planning)
    add_simulate_arguments(simulating)
    for command in (planning, simulating):
        command.set_defaults(ranks_write=True)
    mapping = _describe(commands, fairkv_map)
    add_map_arguments(mapping)
    # It writes its file itself, too: what it prints is a summary.
    mapping.set_defaults(ranks_write=True)
    add_dry_run_arguments(_describe(commands, dry_run))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry of the console script."""
    arguments = _parser().parse_args(argv)
    try:
        result = arguments.function(arguments)
        if result is None:
            return 0
        text = json.dumps(result, indent=2)
        if arguments.json and not arguments.ranks_write:
            from megakv.tracking.files import write_whole

            write_whole(arguments.json, text.encode())
        print(text)
    except (ValueError, MegaKVError, OSError) as error:
        print(f"megakv: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("megakv: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
