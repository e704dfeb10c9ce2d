"""Runs a command whose whole process group ends with the process that asked for it, even if that one is killed.

``python -S guard.py PIPE COMMAND...`` as the leader of a process group; PIPE is the reading end of a pipe, whose other
end only that process has.
"""

import os
import signal
import sys


def main() -> None:
    """Leave a child to watch the pipe, and become the command."""
    pipe, command = int(sys.argv[1]), sys.argv[2:]
    if os.fork() == 0:
        # Who reads the command's output must not wait for the watch.
        os.closerange(0, 3)
        os.read(pipe, 1)
        os.killpg(0, signal.SIGKILL)
    os.close(pipe)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
