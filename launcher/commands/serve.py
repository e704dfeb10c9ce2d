"""``megakv serve``: starts the ranks of a server, and hands SIGTERM and Ctrl-C on to the one that speaks HTTP."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megakv.launcher.process import handling
from megakv.launcher.ranks import command_line, start_ranks
from megakv.launcher.settings import add_engine_arguments, check_engine_arguments, check_files, mesh_on_hosts
from megakv.serving.http.settings import ApiKeys, HttpSettings, listening_socket
from megakv.serving.settings import ServingSettings

MEGABYTE = 1 << 20
LOOP = ServingSettings()
HTTP = HttpSettings("model")


def add_arguments(parser: argparse.ArgumentParser, *, ranks: bool = True) -> None:
    """What the command takes; with `ranks`, as a user gives it."""
    if ranks:
        parser.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id of the model")
    else:
        parser.add_argument("--model", required=True)
    parser.add_argument("--name", help="what clients call the model (default: MODEL's last part)")
    parser.add_argument("--strict-model", action="store_true", help="refuse requests for a model of another name")
    parser.add_argument("--host", default=HTTP.host, help="where to listen (default %(default)s)")
    parser.add_argument("--port", type=int, default=HTTP.port, help="0 for any that is free (default %(default)s)")
    parser.add_argument("--api-key-file", metavar="FILE", help="keys that clients must give, one a line")
    parser.add_argument(
        "--allow-origin",
        nargs="+",
        metavar="ORIGIN",
        help="let pages of these origins ask, such as http://localhost:3000 (default: none)",
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "--store", metavar="DIR", help="keep what was read of prompts in this folder, for later starts too"
    )
    parser.add_argument("--store-gb", type=float, default=LOOP.store_gb, help="at most (default %(default)s)")
    for option, value, meaning in (
        ("--kv-tokens", LOOP.kv_tokens, "tokens of keys and values on the device (default: half of its free memory)"),
        ("--host-kv-tokens", LOOP.host_kv_tokens, "tokens of them in host memory (default %(default)s)"),
        ("--chunk-tokens", LOOP.chunk_tokens, "prompt tokens of a pass at most (default %(default)s)"),
        (
            "--prompt-lookup",
            LOOP.prompt_lookup,
            "next tokens at most that are looked up in prompt and answer, and checked in one pass where that pays; 0: "
            "none (default %(default)s)",
        ),
        ("--max-sequences", LOOP.max_sequences, "requests that run at a time (default %(default)s)"),
        ("--max-queue", LOOP.max_queue, "requests that wait; more are refused (default %(default)s)"),
        ("--max-new-tokens", HTTP.max_new_tokens, "tokens of an answer at most (default %(default)s)"),
        ("--max-choices", HTTP.max_choices, "answers of one call at most (default %(default)s)"),
        ("--max-connections", HTTP.max_connections, "open connections at most (default %(default)s)"),
        ("--max-body-mb", HTTP.max_body_bytes // MEGABYTE, "of a request at most, in MiB (default %(default)s)"),
    ):
        parser.add_argument(option, type=int, default=value, metavar="N", help=meaning)
    parser.add_argument(
        "--max-gap",
        type=float,
        default=LOOP.max_gap_s,
        metavar="S",
        help="longest time between two tokens of a stream while other prompts are read (default %(default)s)",
    )
    parser.add_argument(
        "--decode-share",
        type=float,
        default=LOOP.decode_share,
        metavar="X",
        help="part of the time that streams keep while prompts are read (default %(default)s)",
    )
    parser.add_argument(
        "--stall",
        type=float,
        default=HTTP.stall_s,
        metavar="S",
        help="how long a client may send or read nothing while it is its turn (default %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write a report of all served requests at the end")
    parser.add_argument("--report", metavar="FILE", help="write the HTML page of megakv report about them")
    parser.add_argument("--threads", type=int, help="threads of every rank (default: cores / ranks, on the CPU)")
    parser.add_argument("--hostfile", metavar="FILE", help="ranks on these hosts: lines NAME slots=RANKS")
    parser.add_argument("--pid-file", help=argparse.SUPPRESS)


def loop_settings(arguments: argparse.Namespace) -> ServingSettings:
    """Of the loop; a ValueError names what cannot be."""
    return ServingSettings(
        max_gap_s=arguments.max_gap,
        decode_share=arguments.decode_share,
        chunk_tokens=arguments.chunk_tokens,
        max_sequences=arguments.max_sequences,
        max_queue=arguments.max_queue,
        prompt_lookup=arguments.prompt_lookup,
        kv_tokens=arguments.kv_tokens,
        host_kv_tokens=arguments.host_kv_tokens,
        store=None if arguments.store is None else Path(arguments.store),
        store_gb=arguments.store_gb,
    )


def http_settings(arguments: argparse.Namespace) -> HttpSettings:
    """Of the HTTP server; a ValueError names what cannot be."""
    keys = arguments.api_key_file
    return HttpSettings(
        model=arguments.name or Path(arguments.model).name,
        host=arguments.host,
        port=arguments.port,
        keys=ApiKeys() if keys is None else ApiKeys.read(keys),
        max_body_bytes=arguments.max_body_mb * MEGABYTE,
        max_connections=arguments.max_connections,
        max_new_tokens=arguments.max_new_tokens,
        max_choices=arguments.max_choices,
        stall_s=arguments.stall,
        strict_model=arguments.strict_model,
        origins=tuple(arguments.allow_origin or ()),
    )


def run(arguments: argparse.Namespace) -> None:
    """Serve until asked to end."""
    check_engine_arguments(arguments)
    loop_settings(arguments)
    http = http_settings(arguments)
    cp, tp = mesh_on_hosts(arguments)
    if arguments.hostfile is None:
        check_files(arguments)
        # Before ranks take their time to start; on another host the first of them looks.
        listening_socket(http).close()
    start = {"ranks": cp * tp, "threads": arguments.threads, "hostfile": arguments.hostfile}
    for name in ("threads", "hostfile"):
        delattr(arguments, name)
    with tempfile.TemporaryDirectory(prefix="megakv-") as folder:
        arguments.pid_file = str(Path(folder) / "pid")
        with _ends_handed_on(Path(arguments.pid_file)):
            start_ranks("megakv.launcher.serve", command_line(arguments), **start)


@contextmanager
def _ends_handed_on(pid_file: Path) -> Iterator[None]:
    """SIGTERM and Ctrl-C are for the rank whose process the file names; before there is one, and the second time, for
    this process."""
    asked = False

    def hand_on(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        pid = None
        with suppress(OSError, ValueError):
            pid = int(pid_file.read_text())
        if asked or pid is None:
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
        asked = True
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        # Not by sys.stderr: the signal may have come in the middle of a write to it.
        os.write(2, b"megakv: answers under way are ended first; asked again, they are not\n")

    with handling({signal.SIGINT: hand_on, signal.SIGTERM: hand_on}):
        yield
