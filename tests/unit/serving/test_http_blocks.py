"""Reasoning of answers, and of answers that are sent back, by ``/v1/messages`` and ``/v1/responses`` as by chats."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megakv.serving.http.blocks import Blocks, Step
from megakv.serving.http.parts import Part, ReasoningText, ToolCall
from megakv.serving.http.settings import HttpSettings
from tests.distributed.models import prose
from tests.unit.serving.conftest import NAME, Served, running
from tests.unit.serving.test_http_anthropic import answered, events, put_together, user

THOUGHTS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        # Words that begin with one of these, but for that letter; all others are content.
        "reasoning_content": {"open_pattern": r"\s*[a-e]", "close": " ", "content": "text"},
        "content": {"content": "text"},
    },
}


@pytest.fixture(scope="module")
def thinking(served: Served) -> Iterator[Served]:
    model = replace(served.model, answer_template=THOUGHTS)
    with running((served.loop, model), HttpSettings(NAME, port=0)) as url:
        yield replace(served, model=model, url=url)


KINDS = ("reasoning_text", "output_text")


def chat(served: Served) -> tuple[str, str, str]:
    """What is asked, thought and said by ``/v1/chat/completions``."""
    while True:
        text = prose(9)
        answer = served.client().chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": text}], max_tokens=8, temperature=0
        )
        message: Any = answer.choices[0].message
        if message.content and getattr(message, "reasoning_content", None):
            return text, message.reasoning_content, message.content


def test_messages_think(thinking: Served) -> None:
    text, thought, said = chat(thinking)
    blocks = answered(thinking.url, messages=[user(text)])["content"]
    assert "".join(block["thinking"] for block in blocks if block["type"] == "thinking") == thought
    assert "".join(block["text"] for block in blocks if block["type"] == "text") == said
    assert list(put_together(events(thinking.url, messages=[user(text)]))) == blocks


def test_responses_think(thinking: Served) -> None:
    text, thought, said = chat(thinking)
    asked: dict[str, Any] = {"model": NAME, "input": text, "max_output_tokens": 8, "temperature": 0}
    response = thinking.client().responses.create(**asked)
    found = "".join(item.content[0].text for item in response.output if item.type == "reasoning")
    assert found == thought and response.output_text == said
    with thinking.client().responses.stream(**asked) as stream:
        events_ = list(stream)
    final = events_[-1].response
    deltas = {kind: "".join(e.delta for e in events_ if e.type == f"response.{kind}.delta") for kind in KINDS}
    assert deltas == {"reasoning_text": thought, "output_text": said} and final.output_text == said
    items = [{"role": "user", "content": text}, *(item.model_dump() for item in final.output), user("aa")]
    again = thinking.client().responses.create(**{**asked, "input": items})
    assert again.usage.output_tokens and again.output


def test_one_block_is_open_at_a_time() -> None:
    blocks, news = Blocks(), []
    parts: list[Part] = [ReasoningText("a"), "\n", " \n", ToolCall("f", "{}"), "\n", "b", " ", ToolCall("g", "")]
    for part in parts:
        news += [(step, block.index, more) for step, block, more in blocks.add(part)]
    news += [(step, block.index, more) for step, block, more in blocks.end(empty=True)]
    said = [(block.kind, block.name, block.text) for block in blocks.all]
    assert said == [("reasoning", "", "a"), ("call", "f", "{}"), ("text", "", "\nb "), ("call", "g", "")]
    begun_and_ended = [(step, index) for step, index, _ in news if step is not Step.MORE]
    assert begun_and_ended == [(step, index) for index in range(4) for step in (Step.BEGUN, Step.ENDED)]


@pytest.mark.parametrize("blank", ["", "\n"])
def test_an_answer_of_nothing_is_an_empty_text(blank: str) -> None:
    blocks = Blocks()
    assert not list(blocks.add(blank))
    list(blocks.end(empty=True))
    assert [(block.kind, block.text) for block in blocks.all] == [("text", blank)]
