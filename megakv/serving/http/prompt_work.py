"""Where bodies are read and prompts made: in threads, by users who take turns.

A tokenizer does not hold the interpreter, a template and a parser let go of it again and again: streams are written
meanwhile. What was begun for a client that has left goes on to its end, which the model's context bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from megakv.serving.http.prompt_reader import PromptReader, letters_of
from megakv.serving.http.schemas import Body

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
        self._short, self._long = Lane(PLACES), Lane(PLACES)

    async def read(self, user: str, kind: type[B], content: bytearray) -> tuple[B, Prompts]:
        """A body without its texts, from its JSON, of which nothing is left; and the tokens of its prompts, none of one
        whose texts are kept.
        """

        def read() -> tuple[B, Prompts]:
            body, prompts = self._reader.read(kind, content)
            return body, [tuple(prompt) for prompt in prompts]

        return await self._lane(len(content)).do(user, read)

    async def encode_chat(
        self, user: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
    ) -> tuple[int, ...]:
        """The tokens of a conversation up to where its next answer begins."""
        letters = letters_of([messages, tools, options])
        self._reader.check_letters(letters)
        found = await self._lane(letters).do(user, self._reader.encode_chat, messages, tools, options)
        return tuple(found)

    async def encode(self, user: str, text: str, *, special: bool) -> tuple[int, ...]:
        """The tokens of a plain text."""
        self._reader.check_letters(len(text))
        return tuple(await self._lane(len(text)).do(user, partial(self._reader.encode, text, special=special)))

    async def in_thread(self, user: str, work: Callable[..., R], *values: Any) -> R:
        """Short work."""
        return await self._short.do(user, work, *values)

    def _lane(self, size: int) -> Lane:
        return self._short if size <= SHORT else self._long


class Lane:
    """So many pieces of work at a time. Users wait in a ring: each has no more in it than could be done at once."""

    def __init__(self, places: int):
        self._most, self._places = places, asyncio.Semaphore(places)
        self._users: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(places, "megakv-prompts")

    async def do(self, user: str, work: Callable[..., R], *values: Any) -> R:
        """What a piece of work comes to, in a thread. Whoever leaves meanwhile leaves the place when it is done."""
        own = self._users.setdefault(user, asyncio.Semaphore(self._most))
        await own.acquire()
        try:
            await self._places.acquire()
        except BaseException:
            own.release()
            raise
        working = asyncio.get_running_loop().run_in_executor(self._threads, work, *values)

        def leave(_: object) -> None:
            self._places.release()
            own.release()

        working.add_done_callback(leave)
        return await asyncio.shield(working)
