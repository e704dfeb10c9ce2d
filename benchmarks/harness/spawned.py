"""Ranks in processes of their own, which answer what this one asks them over pipes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

import torch.multiprocessing as mp

from .launch import free_port
from .world import World, join_world

Serve = Callable[[World, ExitStack], Callable[[Any], Any]]
"""Makes a rank ready, with what is to be closed at its end, and says how it answers."""


class Spawned:
    """One world of ranks, in a ``with``."""

    def __init__(self, ranks: int, threads: int, serve: Callable[..., Callable[[Any], Any]], *given: Any):
        self._stack, self._pipes = ExitStack(), []
        port, spawn, processes = free_port(), mp.get_context("spawn"), []
        for rank in range(ranks):
            own, other = spawn.Pipe()
            words = (other, rank, ranks, threads, port, partial(serve, *given))
            processes.append(spawn.Process(target=_run, args=words, daemon=True))
            processes[-1].start()
            other.close()
            self._pipes.append(own)
        # All are told of the end before any is waited for: no rank leaves alone.
        for process in processes:
            self._stack.callback(process.join)
        for pipe in self._pipes:
            self._stack.callback(pipe.close)
        for pipe in self._pipes:
            pipe.recv()

    def ask(self, what: Any) -> Any:
        """Rank 0's answer; all ranks are asked."""
        for pipe in self._pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self._pipes][0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ending: object) -> None:
        self._stack.close()


def _run(pipe: Connection[Any, Any], rank: int, ranks: int, threads: int, port: int, serve: Serve) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    world = join_world(threads, shared_memory=False, timeout_s=600.0)
    with ExitStack() as stack:
        answer = serve(world, stack)
        pipe.send(None)
        while True:
            try:
                asked = pipe.recv()
            except EOFError:
                break
            pipe.send(answer(asked))
    world.leave()
