"""`MegaKVEngine.generate` alone, on ranks of its own: the tokens that a server's answers must have."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from tqdm import tqdm

from .launch import free_port

Asked = tuple[list[int], int]
"""A prompt, and how many new tokens."""


@dataclass(frozen=True)
class Alone:
    """An answer; `margins` are by how much each token's logit is above the second."""

    tokens: list[int]
    margins: list[float]


def answers(arguments: argparse.Namespace, asked: list[Asked], dtype: str) -> list[Alone]:
    """Those of as many ranks as the server has, one request after the other."""
    port, spawn, found = free_port(), mp.get_context("spawn"), []
    with ExitStack() as owned:
        pipes: list[Connection[Any, Any]] = []
        for rank in range(arguments.ranks):
            own, other = spawn.Pipe()
            settings = (other, rank, arguments.ranks, arguments.threads, port, dtype, arguments.model)
            process = spawn.Process(target=_serve, args=settings, daemon=True)
            process.start()
            other.close()
            owned.callback(process.join)
            pipes.append(own)
        # All are told of the end before any is waited for.
        for pipe in pipes:
            owned.callback(pipe.close)
        for each in tqdm(asked, desc="engine.generate alone"):
            for pipe in pipes:
                pipe.send(each)
            found.append([pipe.recv() for pipe in pipes][0])
    return found


def _serve(pipe: Connection[Any, Any], rank: int, ranks: int, threads: int, port: int, dtype: str, model: str) -> None:
    """One rank: answers what it is asked."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from transformers import AutoModelForCausalLM

    import megakv

    from .models import DTYPES, without_stop
    from .world import join_world

    world = join_world(threads, shared_memory=False, timeout_s=600.0)
    loaded = without_stop(AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).eval())
    section = {"context_parallel": {"size": ranks}}
    with torch.no_grad(), megakv.init_inference(loaded, {"dtype": dtype, "megakv": section}) as engine:
        while True:
            try:
                prompt, new_tokens = pipe.recv()
            except EOFError:
                break
            options = {"max_new_tokens": new_tokens, "do_sample": False}
            output = engine.generate(
                torch.tensor([prompt]), **options, return_dict_in_generate=True, output_logits=True
            )
            best = torch.stack([logits[0].topk(2).values for logits in output.logits])
            pipe.send(Alone(output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    world.leave()
