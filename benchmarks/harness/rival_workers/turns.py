"""Turns of every rival's worker: it joins the benchmark and answers one prompt after the other.

Workers run in their rivals' environments, so this file needs the standard library alone. A worker is told its settings
in the JSON file that its command line names, and speaks JSON lines over a socket in the file system, which libraries
that print do not disturb and which reaches hosts that are namespaces. It waits for its next prompt asleep.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
Generate = Callable[[list[int], int, Callable[[int], None]], None]
"""Given a prompt and the number of new tokens; calls back with each of them when it is there."""


def begin() -> dict[str, Any]:
    """The worker's settings. From here on it, and what it starts, keeps to its cores."""
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    cores = settings["cores"]
    os.sched_setaffinity(0, cores[RANK % len(cores)])
    return settings


def serve(settings: dict[str, Any], facts: dict[str, Any], generate: Generate) -> None:
    """Answer prompts until the benchmark closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(settings["socket"])
        with connection.makefile("rw") as lines:

            def say(words: dict[str, Any]) -> None:
                lines.write(json.dumps(words) + "\n")
                lines.flush()

            say({"rank": RANK, "facts": facts})
            for line in lines:
                asked = json.loads(line)
                try:
                    say(answer(generate, asked["prompt"], asked["new_tokens"]))
                except Exception as error:
                    # Whatever the rival raises is the table's reason why it has no time.
                    say({"error": f"{type(error).__name__}: {error}"})
                    raise


def answer(generate: Generate, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """The tokens with their times since the prompt came, and the peak memory of this process meanwhile."""
    tokens: list[int] = []
    times: list[float] = []

    def came(token: int) -> None:
        times.append(time.perf_counter() - start)
        tokens.append(token)

    known = reset_peak()
    start = time.perf_counter()
    generate(prompt, new_tokens, came)
    return {"tokens": tokens, "times_s": times, "peak_rss_bytes": peak_rss_bytes(), "peak_of_turn": known}


def reset_peak() -> bool:
    """Give freed memory back and forget the peak so far; False where the kernel does not let a process do that."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
