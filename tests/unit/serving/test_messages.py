"""What ranks and the process that speaks HTTP tell each other arrives as it was sent, and in one message a step."""

import asyncio
import random
import re
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer

from megakv.serving import api
from megakv.serving.api import ApiLink
from megakv.serving.form import Form
from megakv.serving.http.errors import ApiError
from megakv.serving.http.process import connect
from megakv.serving.inbox import RefusedError
from megakv.serving.messages import (
    SIZES,
    Messages,
    events_message,
    message,
    read_events,
    read_stats,
    read_submit,
    stats_message,
    submit_message,
)
from megakv.serving.request import Event, Finished, Progress, Request, Sampling, Scored, Token
from megakv.serving.stats import Document, ServingStats
from tests.unit.serving.tokenizers import byte_level

MOST_S = 60.0


def drawn_text() -> str:
    return "".join(random.choices(["a", "\n", '"', "\\", "\ud800", "漢", "😀"], k=random.randrange(9)))


def drawn_request(form: Form | None = None) -> Request:
    sampling = Sampling(
        temperature=random.random(),
        top_k=random.randrange(9),
        logit_bias={
            random.randrange(99): random.choice([-1.5, float("-inf"), 3.0]) for _ in range(random.randrange(4))
        },
        seed=random.choice([None, 0, (1 << 63) - 1]),
    )
    return Request(
        id="a",
        prompt=tuple(random.choices(range(1 << 18), k=random.choice([0, 1, 999]))),
        max_new_tokens=random.randrange(1, 99),
        sink=lambda event: None,
        sampling=sampling,
        stop_ids=frozenset(random.choices(range(99), k=random.randrange(3))),
        logprobs=random.choice([None, 0, 5]),
        prompt_logprobs=random.choice([None, 0, 5]),
        priority=random.randrange(-100, 101),
        user=drawn_text(),
        key=drawn_text(),
        form=form,
        compresses=random.random() < 0.5,
        prompt_lookup=random.choice([None, 0, 9]),
    )


def sent(content: bytes, most: int = 1 << 30) -> list[tuple[dict[str, Any], bytes]]:
    """Messages, whatever pieces they come in."""
    messages, found = Messages(most), []
    while content:
        size = random.choice([1, 7, 1000, len(content)])
        found += messages.add(content[:size])
        content = content[size:]
    return found


def test_requests_arrive_as_they_were_sent() -> None:
    tokenizer: LLTokenizer = from_tokenizer(byte_level())
    form = Form.json({"type": "object", "properties": {"a": {"type": "integer"}}}, tokenizer)
    requests = [drawn_request(random.choice([None, form])) for _ in range(20)]
    found = sent(b"".join(submit_message(number, request) for number, request in enumerate(requests)))
    assert [header["n"] for header, _ in found] == list(range(20))
    for (header, tail), request in zip(found, requests, strict=True):
        read = read_submit(header, tail, "b", request.sink, lambda grammar: Form.of(grammar, tokenizer))
        assert (read.form is None) == (request.form is None)
        assert read.form is None or read.form.grammar == form.grammar
        assert vars(replace(read, id="a", form=None)) == vars(replace(request, form=None))


def test_events_arrive_in_each_requests_order() -> None:
    for _ in range(20):
        events: dict[int, list[Event]] = {}
        for number in range(random.randrange(9)):
            plain = random.random() < 0.5
            values = [random.randrange(1 << 18) for _ in range(random.randrange(3))]
            told: list[Event] = [Progress(1, 2, 3, random.choice([(), (1, 2)]))] * random.randrange(3)
            told += [Scored((Token(1, -0.5), Token(2, -1.5, ((3, -0.25),))))] * random.randrange(3)
            told += [Token(id) if plain else Token(id, -0.5, ((id, -0.5), (1, float("-inf")))) for id in values]
            told += [Finished(random.choice(["stop", "error"]), drawn_text())] * random.randrange(2)
            events[number] = told
        # All requests' events between each other.
        order = [number for number, told in events.items() for _ in told]
        random.shuffle(order)
        rests = {number: iter(told) for number, told in events.items()}
        [(header, tail)] = sent(events_message([(number, next(rests[number])) for number in order], "serving"))
        found: dict[int, list[Event]] = {number: [] for number in events}
        for number, event in read_events(header, tail):
            found[number].append(event)
        assert found == events and header["state"] == "serving"


def test_stats_arrive_as_they_were_sent() -> None:
    tiers: Any = {"device": 1, "host": 2, "disk": 3}
    times = [random.random() for _ in range(5)]
    stats = ServingStats(
        state="serving", waiting=1, running=2, memory_bytes=(1, 2), kv_tokens=tiers, kv_capacity=tiers, kv_bytes=tiers,
        ttft_s=times[:2], token_s=times[2:], requests=7,
    )  # fmt: skip
    documents = [Document(1, 2, (3, 4), "host", 0.5, 6)]
    [(header, tail)] = sent(stats_message(stats, documents))
    assert read_stats(header, tail) == (stats, documents)


def test_what_is_too_large_is_no_message() -> None:
    with pytest.raises(ValueError, match="a message of 2000 bytes: allowed: 1000"):
        list(Messages(1000).add(SIZES.pack(1000, 1000)))


class Loop:
    """A loop without an engine: what it was asked for."""

    def __init__(self) -> None:
        self.state, self.listeners, self.failure = "serving", list[Any](), ""
        self.requests, self.cancelled = list[Request](), list[str]()
        self.refuses: Exception | None = None
        self.failed = threading.Event()

    def submit(self, request: Request) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(request)

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def drain(self) -> None:
        self.state = "draining"

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        self.failed.set()


class Linked:
    """A link to a loop without an engine, in a ``with``."""

    def __init__(self) -> None:
        self.loop: Any = Loop()
        ours, self.theirs = socket.socketpair()
        self.link = ApiLink(self.loop, ours, form=lambda grammar: pytest.fail(grammar))

    def __enter__(self) -> "Linked":
        self.link.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self.link.close()
        self.theirs.close()


def test_a_step_of_many_streams_is_one_message() -> None:
    streams = 64
    with Linked() as linked:
        linked.theirs.sendall(b"".join(submit_message(number, drawn_request()) for number in range(streams)))
        messages, found = Messages(1 << 20), list[Any]()
        linked.theirs.settimeout(MOST_S)
        while len(found) < streams:
            found += messages.add(linked.theirs.recv(1 << 16))
        assert {header["op"] for header, _ in found} == {"taken"}
        for step in range(3):
            for request in linked.loop.requests:
                request.sink(Token(step))
            linked.loop.listeners[0]()
        # A step of which nobody is told anything.
        linked.loop.listeners[0]()
        content = b""
        found = []
        while len(found) < 3:
            content = linked.theirs.recv(1 << 16)
            found += messages.add(content)
        assert len(found) == 3 and all(header["op"] == "events" and not header["behind"] for header, _ in found)
        for step, (header, tail) in enumerate(found):
            assert list(read_events(header, tail)) == [(number, Token(step)) for number in range(streams)]


def test_requests_are_kept_with_their_tokens_until_they_end() -> None:
    async def main(linked: Linked) -> None:
        ranks = await connect(linked.theirs)
        told: list[Event] = []
        request = replace(drawn_request(), sink=told.append)
        number = await ranks.submit(request)
        loop = linked.loop
        assert loop.requests[0].prompt == request.prompt and ranks.records[number].request is request
        for event in (Progress(0, 1, 1), Token(5), Token(7)):
            loop.requests[0].sink(event)
        loop.listeners[0]()
        while len(told) < 3:
            await asyncio.sleep(0.01)
        assert told == [Progress(0, 1, 1), Token(5), Token(7)] and ranks.records[number].tokens == [5, 7]
        ranks.cancel(number)
        while not loop.cancelled:
            await asyncio.sleep(0.01)
        assert loop.cancelled == [loop.requests[0].id]
        # An end may come before the answer to whoever asked.
        for refusal, status in ((RefusedError("full"), 429), (ValueError("too long"), 400)):
            loop.refuses = refusal
            with pytest.raises(ApiError) as refused:
                await ranks.submit(drawn_request())
            assert refused.value.status == status and refused.value.message == str(refusal)
        assert list(ranks.records) == [number]
        linked.link.drain()
        while ranks.state != "draining":
            await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="the server is ending"):
            await ranks.submit(drawn_request())

    with Linked() as linked:
        asyncio.run(asyncio.wait_for(main(linked), MOST_S))


def test_when_ranks_are_gone_every_request_ends() -> None:
    async def main(linked: Linked) -> None:
        ranks = await connect(linked.theirs)
        ended, told = asyncio.Event(), list[Event]()
        ranks.on_end = ended.set
        await ranks.submit(replace(drawn_request(), sink=told.append))
        linked.link.close()
        await ended.wait()
        assert told == [Finished("error", "the ranks of this server have ended")] and not ranks.records
        for asked in (ranks.submit(drawn_request()), ranks.stats()):
            with pytest.raises(ApiError) as refused:
                await asked
            assert refused.value.status == 503

    linked = Linked()
    linked.link.start()
    asyncio.run(asyncio.wait_for(main(linked), MOST_S))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has ended"),
        (message({"op": "pickle"}), "has sent what cannot be read .ValueError: no message is called 'pickle'."),
        (SIZES.pack(1 << 31, 1), "a message of 2147483649 bytes: allowed"),
        (message({"op": "submit", "n": 1}), "has sent what cannot be read .KeyError"),
        (SIZES.pack(3, 0) + b"abc", "has sent what cannot be read .JSONDecodeError"),
    ],
)
def test_what_is_no_message_of_a_server_ends_serving(content: bytes, why: str) -> None:
    with Linked() as linked:
        linked.theirs.sendall(content)
        linked.theirs.shutdown(socket.SHUT_WR)
        assert linked.loop.failed.wait(MOST_S)
        assert re.search(why, linked.loop.failure), linked.loop.failure


def test_who_reads_nothing_ends_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 does not wait for it for ever."""
    monkeypatch.setattr(api, "SEND_S", 1.0)
    with Linked() as linked:
        linked.theirs.sendall(message({"op": "standing"}))
        assert linked.link.decided.wait(MOST_S) and linked.link.stands
        linked.link.send(message({"op": "events"}, bytes(8 << 20)))
        assert linked.loop.failure == "the process that speaks HTTP has read nothing for 1 s"
