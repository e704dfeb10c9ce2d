"""Started on every rank: a chat to which lines come through a pipe. Usage: chat.py LINES.json ARGUMENTS...

A line ``[FILE, SECONDS]`` is none: the next one comes so long after the file is there. ``{"interrupted": QUESTION}`` is
one behind which Ctrl-C is pressed until that is said to have helped.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

lines = json.loads(Path(sys.argv.pop(1)).read_text())


def answering() -> bool:
    """Whether this process is in the midst of an answer."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back
    return frame is not None


def type_lines(pipe: int) -> None:
    """What sits before the prompt."""
    for line in lines:
        if isinstance(line, str):
            os.write(pipe, f"{line}\n".encode())
        elif isinstance(line, dict):
            os.write(pipe, f"{line['interrupted']}\n".encode())
            # Ctrl-C while a line is read would be about that line.
            while not answering():
                time.sleep(0.02)
            while "stopped before the first token" not in Path("/proc/self/fd/2").read_text():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.02)
        else:
            while not Path(line[0]).exists():
                time.sleep(0.05)
            time.sleep(line[1])
    os.close(pipe)


if os.environ["RANK"] == "0":
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    sys.stdin = open(0)
    threading.Thread(target=type_lines, args=[writing], daemon=True).start()
runpy.run_module("megakv.launcher.chat", run_name="__main__")
