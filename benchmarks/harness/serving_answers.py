"""Whether answers are those of `engine.generate` alone, token by token, whatever else the server has to do.

Requests are drawn: their lengths log-uniformly, beginnings that they share with earlier ones, clients that leave, and
conversations that several go on from by `previous_response_id`. So many run at a time that passes have several of them.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from typing import Any

from tqdm.asyncio import tqdm

from .launch import Rows, Summary
from .publish import show
from .serving_client import Client, Reply
from .serving_prompts import Passages
from .serving_reference import Alone, answers
from .serving_server import megakv_server

DTYPE = "fp32"
"""With which sums in another order do not choose another token, unless two are as good as equal."""
SHARE, LEAVE, FORK = 0.4, 0.15, 0.2
"""Parts of the requests that begin as an earlier one does, leave before the end, or are responses."""
MOST_NEW, CONCURRENT = 16, 8
BRANCHES = 2
NEAR_TIE = 1e-3
"""Of a token's logit above the second, below which the order of sums may decide."""


@dataclass
class Asked:
    """A request, and what came of it."""

    kind: str
    prompt: list[int]
    new_tokens: int
    leaves_after: int | None = None
    reply: Reply = field(default_factory=Reply)
    text: str | None = None


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each request."""
    passages = Passages(arguments.model, arguments.seed)
    with megakv_server(arguments, dtype=DTYPE) as server:
        asked = asyncio.run(_ask(server.url, passages, arguments))
    alone = answers(arguments, [(each.prompt, each.new_tokens) for each in asked], DTYPE)
    return [_row(passages, each, own) for each, own in zip(asked, alone, strict=True)]


def _draw(passages: Passages, arguments: argparse.Namespace) -> list[Asked]:
    """Requests to ``/v1/completions``."""
    random, found = passages.random, []
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
        async with free:
            await client.complete(
                asked.prompt, asked.new_tokens, into=asked.reply, pieces=True, progress=True,
                leaves=lambda reply: _leaves(asked, reply),
            )  # fmt: skip

    async def converse(client: Client, turns: list[list[int]]) -> None:
        words = [passages.tokenizer.decode(turn, skip_special_tokens=True) or "?" for turn in turns]
        async with free:
            first, text = await client.respond(words[0], MOST_NEW)
        history = [{"role": "user", "content": words[0]}]
        forks.append(_response(passages, history, text))
        history.append({"role": "assistant", "content": text})
        for word in words[1:]:
            async with free:
                _, text = await client.respond(word, MOST_NEW, first)
            forks.append(_response(passages, [*history, {"role": "user", "content": word}], text))

    async with Client(url) as client:
        completions, talks = (complete(client, asked) for asked in found), (converse(client, turns) for turns in said)
        await tqdm.gather(*completions, *talks, desc="requests and conversations")
    return [*found, *forks]


def _leaves(asked: Asked, reply: Reply) -> bool:
    """Of those that leave, some do before the first token."""
    if asked.leaves_after is None:
        return False
    return len(reply.stamps) >= asked.leaves_after if asked.leaves_after else bool(reply.progress)


def _response(passages: Passages, messages: list[dict[str, str]], text: str) -> Asked:
    """A response with the prompt that its conversation comes to."""
    prompt = passages.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return Asked("fork" if len(messages) > 1 else "response", prompt, MOST_NEW, text=text)


def _row(passages: Passages, asked: Asked, alone: Alone) -> dict[str, Any]:
    """The request, and where its answer first differs."""
    row: dict[str, Any] = {"kind": asked.kind, "prompt_tokens": len(asked.prompt), "new_tokens": asked.new_tokens}
    own = passages.pieces(alone.tokens)
    if asked.text is None:
        came = asked.reply.pieces
        row |= {"cached_tokens": asked.reply.cached_tokens, "compared": len(came)}
        at = next((at for at, (a, b) in enumerate(zip(came, own, strict=False)) if a != b), None)
        complete = asked.reply.left or len(came) == asked.new_tokens
    else:
        ends = [at for at, token in enumerate(alone.tokens) if token == passages.tokenizer.eos_token_id]
        tokens = alone.tokens[: ends[0]] if ends else alone.tokens
        row["compared"], complete = len(tokens), True
        at = 0 if passages.tokenizer.decode(tokens, skip_special_tokens=True) != asked.text else None
    row["equal"] = at is None and complete
    if at is not None:
        # Of a text it is not known where it differs.
        row |= {"differs_at": at, "margin": alone.margins[at] if asked.text is None else min(alone.margins)}
    return row


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Whether all are equal; of those that are not, how many differ where two tokens were as good as equal."""
    kinds = sorted({row["kind"] for row in rows})
    table = [
        {
            "kind": kind,
            "requests": len(own),
            "tokens": sum(row["compared"] for row in own),
            "prompt_tokens": sum(row["prompt_tokens"] for row in own),
            "cached": sum(row.get("cached_tokens", 0) for row in own),
            "equal": sum(row["equal"] for row in own),
        }
        for kind in kinds
        for own in [[row for row in rows if row["kind"] == kind]]
    ]
    show(table, "kind requests tokens prompt_tokens cached equal", "Answers compared with engine.generate alone")
    differing = [row for row in rows if not row["equal"]]
    return {
        "answers_equal": not differing,
        "answers": {
            "requests": len(rows),
            "tokens": sum(row["compared"] for row in rows),
            "differing": len(differing),
            "differing_at_near_ties": sum(row.get("margin", 1.0) < NEAR_TIE for row in differing),
        },
    }, []
