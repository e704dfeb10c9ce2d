"""Where bodies are read and prompts made: what is short in this process, what is long in one that ends with its client.

A template or a parser may hold the interpreter, in which streams are written, and a tokenizer cannot be broken off.
``python -m megakv.serving.http.prompt_work CONTROL READER`` has the tokenizer and one thread, so that it can be forked
cheaply for each long piece of work. CONTROL is a socket over which connections come, READER a file with the
`PromptReader`. Over each connection comes the fork's process id, however far the fork is; then the fork takes a piece
of work and sends what it comes to. All of them end when the control's other end does.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from megakv.serving.http.errors import ApiError, unavailable
from megakv.serving.http.prompt_reader import PromptReader, letters_of
from megakv.serving.http.schemas import Body

SHORT = 32 << 10
"""Bytes of a body, or letters of a prompt, which take a few milliseconds."""
PLACES = 2
"""Pieces of work at a time, of those that are short and of those that are not."""
ID_BYTES = 8
NICENESS = 5
"""Streams come first where there are few cores."""
B = TypeVar("B", bound=Body)
R = TypeVar("R")
Prompts = list[tuple[int, ...]]


class PromptWork:
    """Work for users who take turns; short and long work do not wait for each other."""

    def __init__(self, reader: PromptReader):
        self._reader = reader
        self._threads = ThreadPoolExecutor(PLACES, "megakv-prompts")
        self._short, self._long = Lane(PLACES), Lane(PLACES)
        self._stored: Any = None  # The reader in a file without a name.
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the process that is forked for long work, if it is not there; else the first of it waits for that."""
        with self._starting:
            if self._process is not None and self._process.poll() is None:
                return
            if self._stored is None:
                # To look through a vocabulary takes a tenth of a second: once, before there are streams, for all forks.
                _ = self._reader.longest_token
                self._stored = tempfile.TemporaryFile()
                pickle.dump(self._reader, self._stored, pickle.HIGHEST_PROTOCOL)
                self._stored.flush()
            if self._control is not None:
                self._control.close()
            self._control, theirs = socket.socketpair()
            with theirs:
                handed = theirs.fileno(), self._stored.fileno()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "megakv.serving.http.prompt_work", *map(str, handed)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=handed,
                    # Whatever signals a terminal sends: it ends with this process.
                    process_group=0,
                )

    def close(self) -> None:
        """End all that is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._starting:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                if self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            if self._stored is not None:
                self._stored.close()

    async def read(self, user: str, kind: type[B], parts: list[bytes]) -> tuple[B, Prompts]:
        """A body without its texts, from the parts in which it came, which are taken out of the list; and the tokens of
        its prompts, none of one whose texts are kept.
        """
        if sum(map(len, parts)) <= SHORT:
            body, prompts = await self.in_thread(user, self._reader.read, kind, bytearray().join(parts))
        else:
            body, prompts = await self._in_process(user, "read", (kind,), parts)
        found = []
        for tokens in prompts:
            found.append(tuple(tokens))
            # Others get their turn between two prompts.
            await asyncio.sleep(0)
        return body, found

    async def encode_chat(
        self, user: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
    ) -> tuple[int, ...]:
        """The tokens of a conversation up to where its next answer begins."""
        letters = letters_of([messages, tools, options])
        self._reader.check_letters(letters)
        if letters <= SHORT:
            return tuple(await self.in_thread(user, self._reader.encode_chat, messages, tools, options))
        return tuple(await self._in_process(user, "encode_chat", (messages, tools, options), []))

    async def in_thread(self, user: str, work: Callable[..., R], *values: Any) -> R:
        """Short work."""
        async with self._short.place(user):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *values)

    async def _in_process(self, user: str, name: str, values: tuple[Any, ...], content: list[bytes]) -> Any:
        """What a method of the reader comes to in a fork, which ends when this is cancelled.

        The parts of `content` are its last argument, and are taken out of the list.
        """
        async with self._long.place(user):
            await asyncio.get_running_loop().run_in_executor(None, self.start)
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                fork = int.from_bytes(await reader.readexactly(ID_BYTES))
                process = os.pidfd_open(fork)
                try:
                    writer.write(pickle.dumps((name, values, sum(map(len, content))), pickle.HIGHEST_PROTOCOL))
                    while content:
                        # What is there is not here any more.
                        writer.write(content.pop(0))
                        await writer.drain()
                    right, found = pickle.loads(await reader.read())
                finally:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                    os.close(process)
            except (EOFError, OSError, pickle.UnpicklingError):
                message = "the process that reads long requests was ended before it had read this one; send it again"
                raise unavailable(message) from None
            finally:
                writer.close()
        if not right:
            raise ApiError(*found)
        return found


class Lane:
    """So many pieces of work at a time. Users wait in a ring: each has no more in it than could be done at once."""

    def __init__(self, places: int):
        self._most, self._places = places, asyncio.Semaphore(places)
        self._users: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, user: str) -> AsyncIterator[None]:
        """Wait for a place, and keep it until the end."""
        own = self._users.setdefault(user, asyncio.Semaphore(self._most))
        async with own, self._places:
            yield


# In the process that is forked


def main() -> None:
    """Fork for every connection that comes."""
    control, file = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    with open(f"/proc/self/fd/{file}", "rb") as stored:
        reader: PromptReader = pickle.load(stored)
    os.close(file)
    # Nobody asks how a fork ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while True:
        said, connections, _, _ = socket.recv_fds(control, 1, 1)
        if not said:
            # Of this process and its forks, which are a group.
            os.killpg(0, signal.SIGKILL)
        with socket.socket(fileno=connections[0]) as link, suppress(ConnectionError):
            fork = os.fork()
            if fork == 0:
                control.close()
                _work(link, reader)
            link.sendall(fork.to_bytes(ID_BYTES))


def _work(link: socket.socket, reader: PromptReader) -> None:
    """Do one piece of work, and end."""
    os.nice(NICENESS)
    try:
        stream = link.makefile("rwb")
        name, values, length = pickle.load(stream)
        content = bytearray(length)
        if stream.readinto(content) != length:
            raise ConnectionError
        found: Any
        try:
            found = (True, getattr(reader, name)(*values, *([content] if length else [])))
        except ApiError as error:
            found = (False, (error.status, error.message, error.code, error.param))
        del values, content
        pickle.dump(found, stream, pickle.HIGHEST_PROTOCOL)
        stream.flush()
    except (ConnectionError, EOFError):
        # Whoever asked has left.
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
