"""``megakv run``: starts the ranks that read a document together and answer questions about it."""

from __future__ import annotations

import argparse
import os
import stat
import tempfile
from pathlib import Path

from megakv.launcher.prompts import add_question_arguments, decoded, questions, read_document
from megakv.launcher.ranks import command_line, start_ranks
from megakv.launcher.settings import add_job_arguments, check_files, check_job_arguments, mesh_on_hosts

STDIN = ("-", "/dev/stdin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id of the model")
    add_question_arguments(parser)
    add_job_arguments(parser)
    parser.add_argument("--threads", type=int, help="threads of every rank (default: cores / ranks, on the CPU)")
    parser.add_argument("--hostfile", metavar="FILE", help="ranks on these hosts: lines NAME slots=RANKS")


def run(arguments: argparse.Namespace) -> None:
    """Start the ranks, which answer and write what was asked for."""
    check_job_arguments(arguments)
    cp, tp = mesh_on_hosts(arguments)
    piped = _piped(arguments)
    questions(read_document(arguments) if piped is None else piped.decode(), arguments.question)
    if arguments.hostfile is None:
        check_files(arguments)
    where = "this machine" if arguments.hostfile is None else f"the hosts of {arguments.hostfile}"
    print(f"megakv: {arguments.model}: {cp * tp} rank{'s' * (cp * tp > 1)} on {where}, CP {cp} x TP {tp}", flush=True)
    words = [f"--question={text}" for text in arguments.question]
    start = {"ranks": cp * tp, "threads": arguments.threads, "hostfile": arguments.hostfile}
    for name in ("question", "threads", "hostfile"):
        delattr(arguments, name)
    with tempfile.TemporaryFile() as document:
        if piped is not None:
            # Without a name nothing can be left behind, and every rank that opens its standard input reads all of it.
            document.write(piped)
            document.seek(0)
            arguments.prompt_file = "/dev/stdin"
        start_ranks("megakv.launcher.run", [*command_line(arguments), *words], stdin=document, **start)


def _piped(arguments: argparse.Namespace) -> bytes | None:
    """The document that standard input or another pipe brings, which can be read once; None if none does."""
    path = arguments.prompt_file
    if path is None:
        try:
            kind = os.fstat(0).st_mode
        except OSError:
            return None
        if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
            return None
    elif path not in STDIN and not Path(path).is_fifo():
        return None
    if path is None or path in STDIN:
        source = "standard input"
        with open(0, "rb", closefd=False) as file:
            content = file.read()
    else:
        source = f"--prompt-file {path}"
        content = Path(path).read_bytes()
    if not content and path is None:
        return None
    decoded(content, source)
    if arguments.hostfile is not None:
        raise ValueError(
            f"--hostfile {arguments.hostfile} with a document from {source}, a pipe: give --prompt-file a file, which "
            "all hosts can read"
        )
    return content
