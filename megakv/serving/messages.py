"""What the ranks' loop and the process that speaks HTTP tell each other over a local socket.

A message is a header in JSON and a tail of numbers: tokens of a prompt, or those of all streams that one pass made.

======== ======================================================= ==============================
to ranks ``submit``: a request, by a number; its prompt behind   answered by ``taken``
to ranks ``cancel``: a request, by its number
to ranks ``stats``: what was counted, and prefixes that are kept answered by ``stats``
to ranks ``standing``: requests are taken
to HTTP  ``settings``, ``model``: what it begins with, pickled   the parent's own words alone
to HTTP  ``events``: what a pass told all requests, and a state
to HTTP  ``stop``: write what is to be written, and end
======== ======================================================= ==============================
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megakv.serving.form import Form
from megakv.serving.request import Event, Finished, Progress, Request, Sampling, Scored, Token
from megakv.serving.stats import Document, ServingStats, State

SIZES = struct.Struct("<II")
MOST_FROM_HTTP = 256 << 20
"""Bytes of a message to the ranks: a prompt of any length, with what is asked of its answer."""
MOST_FROM_RANKS = 2 << 30
"""Bytes of a message from them: a tokenizer."""
Header = dict[str, Any]


def message(header: Header, tail: bytes = b"") -> bytes:
    """A message as it is sent."""
    content = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((SIZES.pack(len(content), len(tail)), content, tail))


class Messages:
    """Messages out of the bytes in which they come; a ValueError for what is none, or has more than `most` bytes."""

    def __init__(self, most: int):
        self._most, self._held = most, bytearray()

    def add(self, content: bytes) -> Iterator[tuple[Header, bytes]]:
        """Messages that are whole with these bytes."""
        self._held += content
        while len(self._held) >= SIZES.size:
            header, tail = SIZES.unpack_from(self._held)
            if header + tail > self._most:
                raise ValueError(f"a message of {header + tail} bytes: allowed: {self._most}")
            middle, end = SIZES.size + header, SIZES.size + header + tail
            if len(self._held) < end:
                return
            found: Header = json.loads(self._held[SIZES.size : middle])
            behind = bytes(self._held[middle:end])
            del self._held[:end]
            yield found, behind


def submit_message(number: int, request: Request) -> bytes:
    """A request for the ranks."""
    header = {
        "op": "submit",
        "n": number,
        "max_new_tokens": request.max_new_tokens,
        "sampling": asdict(request.sampling),
        "stop_ids": list(request.stop_ids),
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "priority": request.priority,
        "user": request.user,
        "key": request.key,
        "grammar": None if request.form is None else request.form.grammar,
        "compresses": request.compresses,
        "prompt_lookup": request.prompt_lookup,
    }
    return message(header, array("i", request.prompt).tobytes())


def read_submit(
    header: Header, tail: bytes, name: str, sink: Callable[[Event], None], form: Callable[[str], Form]
) -> Request:
    """Request of such a message, with a name of its own; `form` makes a form of a grammar."""
    sampling, grammar = dict(header["sampling"]), header["grammar"]
    # Keys of JSON are texts.
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    return Request(
        id=name,
        prompt=tuple(array("i", tail)),
        max_new_tokens=header["max_new_tokens"],
        sink=sink,
        sampling=Sampling(**sampling),
        stop_ids=frozenset(header["stop_ids"]),
        logprobs=header["logprobs"],
        prompt_logprobs=header["prompt_logprobs"],
        priority=header["priority"],
        user=header["user"],
        key=header["key"],
        form=None if grammar is None else form(grammar),
        compresses=header["compresses"],
        prompt_lookup=header["prompt_lookup"],
    )


def events_message(events: Sequence[tuple[int, Event]], state: State) -> bytes:
    """What requests are told at one time, each by its number, and the loop's state.

    Plain tokens are pairs of numbers in the tail. Before them is how far prompts were read, behind them all else:
    one request's events keep their order so, for nothing is read of a prompt any more when its answer has begun.
    """
    before, scores, behind, tokens = [], [], [], array("i")
    for number, event in events:
        match event:
            case Token(id, None, ()):
                tokens.append(number)
                tokens.append(id)
            case Token(id, logprob, top):
                behind.append([number, "token", id, logprob, top])
            case Progress(cached, read, total, ranks):
                before.append([number, cached, read, total, ranks])
            case Scored(told):
                scores.append([number, [[token.id, token.logprob, token.top] for token in told]])
            case Finished(why, said):
                behind.append([number, "finished", why, said])
    header = {"op": "events", "state": state, "before": before, "scores": scores, "behind": behind}
    return message(header, tokens.tobytes())


def read_events(header: Header, tail: bytes) -> Iterator[tuple[int, Event]]:
    """Events of such a message, in an order that is each request's."""
    for number, cached, read, total, ranks in header["before"]:
        yield number, Progress(cached, read, total, tuple(ranks))
    for number, told in header["scores"]:
        yield number, Scored(tuple(_token(*each) for each in told))
    tokens = array("i", tail)
    for number, token in zip(tokens[::2], tokens[1::2], strict=True):
        yield number, Token(token)
    for number, kind, *values in header["behind"]:
        if kind == "token":
            yield number, _token(*values)
        else:
            yield number, Finished(*values)


def _token(token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> Token:
    return Token(token, logprob, tuple((other, likely) for other, likely in top))


def stats_message(stats: ServingStats, documents: Sequence[Document]) -> bytes:
    """A server's load, and the prefixes that it keeps; times are in the tail."""
    values = asdict(stats)
    ttft, token = values.pop("ttft_s"), values.pop("token_s")
    header = {"op": "stats", "stats": values, "ttft": len(ttft), "documents": [asdict(each) for each in documents]}
    return message(header, array("d", [*ttft, *token]).tobytes())


def read_stats(header: Header, tail: bytes) -> tuple[ServingStats, list[Document]]:
    """Load and prefixes of such a message."""
    times, first = array("d", tail).tolist(), header["ttft"]
    values = header["stats"] | {"memory_bytes": tuple(header["stats"]["memory_bytes"])}
    documents = [Document(**{**each, "beginning": tuple(each["beginning"])}) for each in header["documents"]]
    return ServingStats(**values, ttft_s=times[:first], token_s=times[first:]), documents
