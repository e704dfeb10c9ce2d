"""Whether answers are those of `engine.generate` alone, token by token, whatever else the server has to do.

Requests are drawn: their lengths log-uniformly, beginnings that they share with earlier ones, clients that leave, and
conversations that several go on from by `previous_response_id`. So many run at a time that passes have several of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm
from tqdm.asyncio import tqdm as async_tqdm
from transformers import AutoModelForCausalLM

import megakv
from megakv.base.errors import MegaKVError

from ..document import Passages
from ..launch import Rows, Summary, start_ranks
from ..models import DTYPES, without_stop
from ..publish import show
from ..world import World
from .server import Client, Reply, megakv_server

DTYPE = "fp32"  # With which sums in another order do not choose another token, unless two are as good as equal
SHARE, LEAVE, FORK = 0.4, 0.15, 0.2
"""Parts of the requests that begin as an earlier one does, leave before the end, or are responses."""
MOST_NEW, CONCURRENT, BRANCHES = 16, 8, 2
NEAR_TIE = 1e-3  # Of a token's logit above the second, below which the order of sums may decide


@dataclass
class Asked:
    """A request, and what came of it."""

    kind: str
    prompt: list[int]
    new_tokens: int
    leaves_after: int | None = None
    reply: Reply = field(default_factory=Reply)
    text: str | None = None

    def leaves(self, reply: Reply) -> bool:
        """Whether the client leaves now; some do before the first token."""
        if self.leaves_after is None:
            return False
        return len(reply.stamps) >= self.leaves_after if self.leaves_after else bool(reply.progress)


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each request."""
    passages = Passages(arguments.model, arguments.seed)
    with megakv_server(arguments, dtype=DTYPE) as server:
        asked = asyncio.run(_ask(server.url, passages, arguments))
    # By as many ranks as the server has, one request after the other.
    with TemporaryDirectory(prefix="megakv-benchmark-") as folder:
        given, part = Path(folder) / "asked.json", Path(folder) / "part.json"
        given.write_text(json.dumps([(each.prompt, each.new_tokens) for each in asked]))
        options = ["--model", arguments.model, "--asked", str(given), "--part", str(part)]
        if start_ranks(arguments, options, ranks=arguments.ranks, timeout_s=arguments.timeout):
            raise MegaKVError("engine.generate alone has failed")
        found = json.loads(part.read_text())["rows"]
    return [_row(passages, each, *own) for each, own in zip(asked, found, strict=True)]


@torch.no_grad()
def generate_alone(arguments: argparse.Namespace, world: World) -> list[Any]:
    """Answers of `engine.generate`, as one of its ranks: tokens, and how far each one's logit is above the second."""
    loaded = without_stop(AutoModelForCausalLM.from_pretrained(arguments.model, dtype=DTYPES[DTYPE]).eval())
    section, found = {"context_parallel": {"size": world.size}}, []
    with megakv.init_inference(loaded, {"dtype": DTYPE, "megakv": section}) as engine:
        for prompt, new in tqdm(json.loads(Path(arguments.asked).read_text()), disable=world.rank > 0):
            options = {"max_new_tokens": new, "do_sample": False, "output_logits": True}
            output = engine.generate(torch.tensor([prompt]), **options, return_dict_in_generate=True)
            best = torch.stack([logits[0].topk(2).values for logits in output.logits])
            found.append((output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return found


def _draw(passages: Passages, arguments: argparse.Namespace) -> list[Asked]:
    """Requests to ``/v1/completions``."""
    random, found = passages.random, list[Asked]()
    chats = passages.tokenizer.chat_template is not None
    while len(found) < arguments.requests * (1 - FORK * chats):
        length, shared = passages.log_uniform(arguments.longest), []
        if found and random.random() < SHARE:
            before = random.choice(found).prompt
            shared = before[: random.randint(1, min(len(before), length))]
        prompt = shared + passages.prompt(length - len(shared))
        asked = Asked("shared" if shared else "new", prompt, random.randint(1, MOST_NEW))
        if random.random() < LEAVE:
            asked.kind, asked.leaves_after = "leaves", random.randrange(asked.new_tokens)
        found.append(asked)
    return found


async def _ask(url: str, passages: Passages, arguments: argparse.Namespace) -> list[Asked]:
    found = _draw(passages, arguments)
    free = asyncio.Semaphore(CONCURRENT)
    conversations = max(0, arguments.requests - len(found)) // (1 + BRANCHES)
    # All is drawn before anything is asked: what is asked does not depend on times.
    said = [[passages.prompt(passages.log_uniform(arguments.longest // 4)) for _ in range(1 + BRANCHES)]
            for _ in range(conversations)]  # fmt: skip
    forks: list[Asked] = []

    async def complete(client: Client, asked: Asked) -> None:
        options: Any = {"into": asked.reply, "pieces": True, "progress": True, "leaves": asked.leaves}
        async with free:
            await client.complete(asked.prompt, asked.new_tokens, **options)

    async def converse(client: Client, turns: list[list[int]]) -> None:
        previous, history = None, list[dict[str, str]]()
        for turn in turns:
            word = passages.tokenizer.decode(turn, skip_special_tokens=True) or "?"
            async with free:
                name, text = await client.respond(word, MOST_NEW, previous)
            asked = [*history, {"role": "user", "content": word}]
            # The prompt that the conversation comes to; all further turns go on from the first.
            prompt = passages.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
            forks.append(Asked("fork" if previous else "response", prompt, MOST_NEW, text=text))
            if previous is None:
                previous, history = name, [*asked, {"role": "assistant", "content": text}]

    async with Client(url) as client:
        completions, talks = (complete(client, asked) for asked in found), (converse(client, turns) for turns in said)
        await async_tqdm.gather(*completions, *talks, desc="requests and conversations")
    return [*found, *forks]


def _row(passages: Passages, asked: Asked, tokens: list[int], margins: list[float]) -> dict[str, Any]:
    """The request, and where its answer first differs."""
    row: dict[str, Any] = {"kind": asked.kind, "prompt_tokens": len(asked.prompt), "new_tokens": asked.new_tokens}
    if asked.text is None:
        came, own = asked.reply.pieces, passages.pieces(tokens)
        row |= {"cached_tokens": asked.reply.cached_tokens, "compared": len(came)}
        at = next((at for at, (a, b) in enumerate(zip(came, own, strict=False)) if a != b), None)
        complete = asked.reply.left or len(came) == asked.new_tokens
    else:
        ends = [at for at, token in enumerate(tokens) if token == passages.tokenizer.eos_token_id]
        tokens = tokens[: ends[0]] if ends else tokens
        row["compared"], complete = len(tokens), True
        at = 0 if passages.tokenizer.decode(tokens, skip_special_tokens=True) != asked.text else None
    row["equal"] = at is None and complete
    if at is not None:
        # Of a text it is not known where it differs.
        row |= {"differs_at": at, "margin": margins[at] if asked.text is None else min(margins)}
    return row


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Whether all are equal; of those that are not, how many differ where two tokens were as good as equal."""
    table = []
    for kind in sorted({row["kind"] for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        sums = {
            name: sum(row.get(name, 0) for row in own)
            for name in ("compared", "prompt_tokens", "cached_tokens", "equal")
        }
        table.append({"kind": kind, "requests": len(own), **sums})
    columns = "kind requests compared prompt_tokens cached_tokens equal"
    show(table, columns, "Answers compared with engine.generate alone")
    differing = [row for row in rows if not row["equal"]]
    found = {"requests": len(rows), "tokens": sum(row["compared"] for row in rows), "differing": len(differing)}
    found["differing_at_near_ties"] = sum(row.get("margin", 1.0) < NEAR_TIE for row in differing)
    return {"answers_equal": not differing, "answers": found}, []
