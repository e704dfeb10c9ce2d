"""``megakv fairkv VERB``: what KV heads keep, where they go, and what that gains; a file of its own for each verb."""

from __future__ import annotations

import argparse
from importlib import import_module
from types import ModuleType
from typing import Any

from megakv.base.errors import require_extra

VERBS = {
    "place": "Profile prompts, map KV heads to ranks, and measure that run against neighbouring heads.",
    "profile": "Run a model over prompts with compression and write what every KV head keeps.",
    "map": "Place KV heads with different budgets on ranks, with copies, so that ranks wait less.",
}
FORMER = {"fairkv-profile": "fairkv profile", "fairkv-map": "fairkv map"}
"""Commands of earlier versions, and what they are called now."""


def check_names(words: list[str]) -> None:
    """Refuse, by a `ValueError` with the present one, what an earlier version called these commands."""
    former, first = ([*words, "", ""])[:2]
    if now := FORMER.get(former):
        raise ValueError(f"there is no megakv {former}: it is megakv {now} now; verbs: {', '.join(VERBS)}")
    if former == "fairkv" and first not in (*VERBS, "", "-h", "--help"):
        raise ValueError(
            f"megakv fairkv {first}: {first!r} is no verb; allowed: {', '.join(VERBS)}; what was megakv fairkv MODEL "
            "is megakv fairkv place MODEL now"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, summary in VERBS.items():
        _module(name).add_arguments(verbs.add_parser(name, help=summary, description=summary))


def run(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Do what the verb says."""
    if arguments.verb != "profile":
        require_extra("plan", f"megakv fairkv {arguments.verb}")
    found: dict[str, Any] | None = _module(arguments.verb).run(arguments)
    return found


def _module(verb: str) -> ModuleType:
    return import_module(f"megakv.launcher.commands.fairkv_{verb}")
