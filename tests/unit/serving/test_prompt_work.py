"""Bodies are read and prompts made by turns, in threads, while streams go on."""

import asyncio
import json
import random
import re
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest

from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.errors import ApiError
from megakv.serving.http.prompt_reader import (
    LEAST_VALUES,
    MOST_ARGUMENTS,
    PIECE_LETTERS,
    BodyLimits,
    BodyScanner,
    PromptReader,
)
from megakv.serving.http.prompt_work import PLACES, SHORT, Lane, PromptWork
from megakv.serving.http.response_schemas import ResponseBody
from megakv.serving.http.schemas import CompletionBody
from tests.unit.serving.tokenizers import byte_level, random_text

MOST_S = 120.0
TRIES, LONGEST_S = 5, 0.05
"""So long of this process's time may an event loop wait for the interpreter, in one of so many tries."""
NONE = BodyLimits(10**9, 10**9, 1, 10**9, 10**9)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<user>{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    return PromptReader("tiny", tokenizer, 1 << 20, 400)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, MOST_S))


def drawn(depth: int = 0) -> Any:
    kind = random.random() + depth / 10
    if kind > 0.7:
        return random.choice([1, True, None, 2.5, "", "a\\", '"', '\\\\"x', "[{,:]}", "é\n"])
    if kind > 0.35:
        return [drawn(depth + 1) for _ in range(random.randrange(4))]
    return {random.choice('abc"\\,{') * random.randrange(4): drawn(depth + 1) for _ in range(random.randrange(4))}


def counts(value: Any) -> tuple[int, int, int]:
    """Values within a value, keys and levels."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    items = list(value.values()) if isinstance(value, dict) else value
    found = [counts(item) for item in items]
    keys = len(items) if isinstance(value, dict) else 0
    sums = [sum(each[place] for each in found) for place in range(2)]
    return len(items) + sums[0], keys + sums[1], 1 + max((each[2] for each in found), default=0)


def passes(body: bytes, limits: BodyLimits) -> bool:
    scanner = BodyScanner(limits)
    try:
        while body:
            size = random.randint(1, 9)
            scanner.add(body[:size])
            body = body[size:]
    except ApiError:
        return False
    return True


def test_what_is_counted_is_what_is_there() -> None:
    for _ in range(300):
        value = drawn()
        body = json.dumps(value, ensure_ascii=random.random() < 0.5).encode()
        values, keys, levels = counts(value)
        assert passes(body, BodyLimits(2 * values + 1, len(body), 1, keys, levels))
        assert not keys or not passes(body, BodyLimits(10**9, 10**9, 1, keys - 1, 10**9))
        assert not levels or not passes(body, BodyLimits(10**9, 10**9, 1, 10**9, levels - 1))
        assert values < 2 or not passes(body, BodyLimits(values - 1, 10**9, 1, 10**9, 10**9))


def test_prompts_alone_may_have_a_value_for_each_position() -> None:
    value = b'{"a":[' + b"{}," * LEAST_VALUES + b"{}]}"
    limits = {numbers: BodyLimits.of(1 << 20, 8, 1, numbers=numbers) for numbers in (False, True)}
    BodyScanner(limits[True]).add(value)
    with pytest.raises(ApiError, match="more than 65536 values"):
        BodyScanner(limits[False]).add(value)
    assert limits[True].letters == limits[False].letters


def few_errors(error: ApiError) -> bool:
    """That no more was looked for than what each kind of a value has against the first item."""
    more = re.search(r"\(and (\d+) more\)", error.message)
    return more is None or int(more[1]) < 3


def test_first_errors_alone_are_looked_for() -> None:
    reader = PromptReader("tiny", byte_level(), 512, 400)
    bodies = [
        {"prompt": [True] * 9999},
        {"prompt": ["a", *[1] * 9999]},
        {"prompt": [[1], *[["a"] * 99] * 99]},
        {"prompt": "a", "stop": [1] * 9999},
        {"prompt": "a", "logit_bias": {str(number): "a" for number in range(9999)}},
        {"prompt": "a", **{str(number): 1 for number in range(9999)}},
        {"prompt": "a", "stream_options": {str(number): 1 for number in range(9999)}},
    ]
    for body in bodies:
        with pytest.raises(ApiError) as refused:
            reader.read_body(CompletionBody, bytearray(json.dumps({"model": "m", **body}).encode()))
        assert few_errors(refused.value), refused.value.message
    options = dict.fromkeys(map(str, range(999)), [])
    for name, value in (("messages", [1] * 9999), ("tools", [1] * 100), ("chat_template_kwargs", options)):
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], name: value}
        with pytest.raises(ApiError) as refused:
            reader.read_body(ChatBody, bytearray(json.dumps(body).encode()))
        assert few_errors(refused.value), refused.value.message


def test_texts_that_are_parsed_have_few_values() -> None:
    """A text is one value of its body, whatever it holds."""
    reader = PromptReader("tiny", byte_level(), 512, 400)
    few, many = (json.dumps({"a": [{}] * count}) for count in (MOST_ARGUMENTS // 4, MOST_ARGUMENTS // 2))

    def chat(arguments: str) -> dict[str, Any]:
        call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": arguments}]}

    def response(arguments: str) -> dict[str, Any]:
        return {"input": [{"type": "function_call", "call_id": "a", "name": "a", "arguments": arguments}]}

    for kind, made in ((ChatBody, chat), (ResponseBody, response)):
        prose = json.dumps("[{," * MOST_ARGUMENTS)
        for arguments, right in ((few, True), (prose, True), (many, False), (many + '"', False)):
            content = bytearray(json.dumps({"model": "m", **made(arguments)}).encode())
            with nullcontext() if right else pytest.raises(ApiError, match="arguments of all calls have more than"):
                reader.read_body(kind, content)
    settings = json.dumps({"generation_config": many, "model": "m", "messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(ApiError, match="generation_config: .* allowed: text of up to 65536 letters"):
        reader.read_body(ChatBody, bytearray(settings.encode()))


def test_nothing_is_kept_of_fields_that_nothing_goes_by() -> None:
    content = json.dumps({"model": "m", "prompt": "a", "metadata": [{}] * 9}).encode()
    body = PromptReader("tiny", byte_level(), 512, 400).read_body(CompletionBody, bytearray(content))
    assert body.metadata is None and body.prompt == "a"


def test_long_work_comes_to_what_short_work_does(reader: PromptReader) -> None:
    work = PromptWork(reader)
    text = random_text(2 * SHORT)
    messages = [{"role": "developer", "content": text}, {"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "a", "description": text}}
    expected = reader.encode_chat(messages, [tool], {})
    assert run(work.encode_chat("a", messages, [tool], {})) == tuple(expected)
    content = json.dumps({"model": "m", "messages": messages, "tools": [tool], "user": "me"}).encode()
    body, prompts = run(work.read("a", ChatBody, bytearray(content)))
    assert prompts == [tuple(expected)] and body.user == "me" and body.functions[0].description == text
    tokens = [[random.randrange(400) for _ in range(SHORT)], [1]]
    content = json.dumps({"model": "m", "prompt": tokens}).encode()
    assert [list(prompt) for prompt in run(work.read("a", CompletionBody, bytearray(content)))[1]] == tokens
    content = json.dumps({"model": "m", "prompt": [text, "a"]}).encode()
    assert run(work.read("a", CompletionBody, bytearray(content)))[1] == [
        tuple(reader.encode(text)),
        tuple(reader.encode("a")),
    ]
    with pytest.raises(ApiError, match=r"prompt\[1\]: true is not allowed; allowed: a whole number"):
        run(work.read("a", CompletionBody, bytearray(b'{"model":"m","prompt":[1,' + b"true," * SHORT + b"1]}")))


def test_all_text_of_a_chat_counts() -> None:
    reader = PromptReader("tiny", byte_level(), 64, 400)
    long, user = "ab " * 4000, {"role": "user", "content": "a"}
    reader.tokenizer.chat_template = TEMPLATE
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": {"a": [long]}}}
    for messages, tools in (
        ([{"role": "user", "content": long}], None),
        ([user], [{"type": "function", "function": {"name": "a", "description": long}}]),
        ([user], [{"type": "function", "function": {"name": "a", "parameters": {"properties": {long: {}}}}}]),
        ([{"role": "assistant", "content": "", "tool_calls": [call]}, user], None),
        ([{"role": "assistant", "content": "", "reasoning_content": long}, user], None),
    ):
        with pytest.raises(ApiError, match="longer than the model's context of 64 tokens"):
            reader.encode_chat(messages, tools or [], {})


def test_a_text_with_too_many_tokens_is_not_made_into_tokens_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, counted, encode = PromptReader("tiny", byte_level(), PIECE_LETTERS // 2, 400), [], PromptReader._encode

    def counting(reader: PromptReader, text: str, *, special: bool) -> list[int]:
        counted.append(len(text))
        return encode(reader, text, special=special)

    monkeypatch.setattr(PromptReader, "_encode", counting)
    with pytest.raises(ApiError, match="longer than the model's context"):
        # No other text has this letter: it has no tokens of several letters.
        reader.encode("ꙮ" * 5 * PIECE_LETTERS)
    assert counted == [PIECE_LETTERS]


def test_an_event_loop_goes_on_while_a_long_prompt_is_read(reader: PromptReader) -> None:
    """Streams are written there: 200,000 tokens at once."""
    work, text = PromptWork(reader), random_text(320_000)
    content = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()

    async def longest() -> float:
        found, reading = 0.0, asyncio.create_task(work.read("a", ChatBody, bytearray(content)))
        while not reading.done():
            # Machines that run tests are busy: what others take does not count.
            begun = time.process_time()
            await asyncio.sleep(0)
            found = max(found, time.process_time() - begun)
            await asyncio.sleep(0.001)
        assert len(reading.result()[1][0]) >= 200_000
        return found

    found = [run(longest()) for _ in range(TRIES)]
    assert min(found) <= LONGEST_S, found


def test_who_leaves_keeps_nobody_but_himself_waiting(reader: PromptReader) -> None:
    async def main() -> None:
        lane, release, begun = Lane(PLACES), threading.Event(), threading.Semaphore(0)

        def piece() -> None:
            begun.release()
            assert release.wait(MOST_S)

        left = [asyncio.create_task(lane.do("a", piece)) for _ in range(PLACES + 2)]
        for _ in range(PLACES):
            await asyncio.to_thread(begun.acquire)
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        # What was begun has its place still, and what was not is not done any more.
        waiting = asyncio.create_task(lane.do("b", lambda: "done"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        release.set()
        assert await waiting == "done" and not begun.acquire(blocking=False)

    run(main())


def test_users_take_turns() -> None:
    async def main() -> None:
        lane, order = Lane(1), []
        users = [*"aaaa", *"bb", "c"]
        waiting = [asyncio.create_task(lane.do(user, order.append, user)) for user in users]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert "".join(order) in ("aabcab", "abcaba", "abcab" + "a"), order
        await asyncio.gather(lane.do("d", order.append, "d"), lane.do("d", order.append, "d"))
        assert order[-2:] == ["d", "d"]

    run(main())
