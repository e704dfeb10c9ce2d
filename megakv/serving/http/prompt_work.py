"""Where bodies are read and prompts made: what is short in this process, what is long in one that ends with its client.

A template or a parser may hold the interpreter, in which streams are written, and a tokenizer cannot be broken off.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from megakv.serving.http.errors import ApiError, unavailable
from megakv.serving.http.prompt_process import LENGTH_BYTES
from megakv.serving.http.prompt_reader import PromptReader, letters_of
from megakv.serving.http.schemas import Body, ChatBody, CompletionBody

SHORT = 32 << 10
"""Bytes of a body, or letters of a prompt, which take a few milliseconds."""
PLACES = 2
"""Pieces of work at a time, of those that are short and of those that are not."""
B = TypeVar("B", bound=Body)
R = TypeVar("R")
Prompts = list[tuple[int, ...]]


class PromptWork:
    """Work for users who take turns; short and long work do not wait for each other."""

    def __init__(self, reader: PromptReader):
        self._reader = reader
        self._threads = ThreadPoolExecutor(PLACES, "megakv-prompts")
        self._short, self._long = Lane(PLACES), Lane(PLACES)
        self._processes = _Processes(reader)

    def start(self) -> None:
        """Make ready for long work, which else the first of it waits for."""
        self._processes.start()

    def close(self) -> None:
        """End all that is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    async def read(self, user: str, kind: type[B], parts: list[bytes]) -> tuple[B, Prompts | None]:
        """A body from the parts in which it came, which are taken out of the list.

        Texts of a long one are not brought here, where that can be: the tokens of its prompts come instead.
        """
        if sum(map(len, parts)) <= SHORT:
            return self._reader.read_body(kind, bytearray().join(parts)), None
        body, prompts = await self._in_process(user, "read", (kind,), parts)
        return body, None if prompts is None else await _apart(prompts)

    async def prompts(self, user: str, body: CompletionBody | ChatBody) -> Prompts:
        """The tokens of a short body's prompts."""
        return await _apart(await self.in_thread(user, self._reader.prompts, body))

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
        async with self._long.place(user):
            return await self._processes.run(name, values, content)


class _Processes:
    """Forks of a process that has the reader, one for each piece of work."""

    def __init__(self, reader: PromptReader):
        self._reader = reader
        self._stored: Any = None  # The reader in a file without a name.
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the process if it is not there."""
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
                    [sys.executable, "-P", "-m", "megakv.serving.http.prompt_process", *map(str, handed)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=handed,
                    # Whatever signals a terminal sends: it ends with this process.
                    process_group=0,
                )

    def close(self) -> None:
        """End the process and its forks."""
        with self._starting:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                if self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            if self._stored is not None:
                self._stored.close()

    async def run(self, name: str, values: tuple[Any, ...], content: list[bytes]) -> Any:
        """What a method of the reader comes to; it ends when this is cancelled.

        The parts of `content` are its last argument, and are taken out of the list.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.start)
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            fork = int.from_bytes(await _received(ours, LENGTH_BYTES))
            try:
                process = os.pidfd_open(fork)
            except ProcessLookupError:
                raise _ended() from None
            try:
                for parts in ([pickle.dumps((name, values), pickle.HIGHEST_PROTOCOL)], content):
                    await loop.sock_sendall(ours, sum(map(len, parts)).to_bytes(LENGTH_BYTES))
                    while parts:
                        # What is there is not here any more.
                        await loop.sock_sendall(ours, parts.pop(0))
                length = int.from_bytes(await _received(ours, LENGTH_BYTES))
                right, found = pickle.loads(await _received(ours, length))
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)
        if not right:
            raise ApiError(*found)
        return found


class Lane:
    """So many pieces of work at a time. Users wait in a ring: each has one piece done when it is its turn."""

    def __init__(self, places: int):
        self._free = places
        self._ring: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def place(self, user: str) -> AsyncIterator[None]:
        """Wait for a place, and keep it until the end; whoever is cancelled leaves the line."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ring.setdefault(user, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give a place to the next one that still waits, or keep it free."""
        while self._ring:
            user = next(iter(self._ring))
            line = self._ring.pop(user)
            turn = line.popleft()
            while line and turn.cancelled():
                turn = line.popleft()
            if line:
                self._ring[user] = line
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1


async def _apart(prompts: list[array[int]]) -> Prompts:
    """Tokens as requests have them; others get their turn between two prompts."""
    found = []
    for tokens in prompts:
        found.append(tuple(tokens))
        await asyncio.sleep(0)
    return found


async def _received(link: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        count = await asyncio.get_running_loop().sock_recv_into(link, view)
        if not count:
            raise _ended()
        view = view[count:]
    return content


def _ended() -> ApiError:
    return unavailable("the process that reads long requests was ended before it had read this one; send it again")
