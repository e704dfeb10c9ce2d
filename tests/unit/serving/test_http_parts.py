"""Tools and reasoning: what templates are given, and how answers are cut into parts, however they come."""

import json
import random
from typing import Any

import pytest
from llguidance.hf import from_tokenizer
from transformers.cli.serving.utils import ReasoningText, ToolCall

from megakv.serving.form import Form
from megakv.serving.http.call import ServedModel
from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.errors import ApiError
from megakv.serving.http.parts import CallsParts, Part, Parts, TemplateParts
from megakv.serving.request import Sampling
from tests.unit.serving.tokenizers import byte_level

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }} {{ tool.function.parameters | tojson }}]{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "!{{ call.function.name }}:{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ANSWERS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<end>", "content": "text"},
    },
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def served() -> ServedModel:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    return ServedModel("tiny", tokenizer, 4096, len(tokenizer), frozenset({0}), Sampling(), ANSWERS)


def rendered(served: ServedModel, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    body = ChatBody.model_validate_json(json.dumps({"model": "tiny", "messages": messages}))
    values = [message.template_values() for message in body.messages]
    text: str = served.tokenizer.decode(list(served.reader.encode_chat(values, tools, {})))
    return text


def test_templates_are_given_tools_and_calls(served: ServedModel) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "is it"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]
    text = rendered(served, messages, [TOOL])
    assert text.startswith('[weather {"type": "object", "properties": {}}]<user>how is it<assistant>!weather:')
    assert "Köln" in text and text.endswith("<tool>warm<assistant>") and "\\" not in text
    # Not in any other order either.
    served.tokenizer.chat_template = TEMPLATE.replace("not loop.first", "true").replace("m.role == 'system'", "m.role")
    with pytest.raises(ApiError, match="system first"):
        rendered(served, [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}], None)


LIBRARY = {
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "provider_specific_fields": {"refusal": None},
    "reasoning": "hm",
    "parsed": {"a": 1},
    "tool_calls": None,
    "id": "msg_1",
}
"""Fields that clients' libraries send back."""


def test_fields_that_are_not_known_are_passed_over(served: ServedModel) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    odd_call = {**call, "index": 0, "extra": 1, "function": {**call["function"], "parsed_arguments": {}, "extra": 1}}
    user, tool = {"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "1", "content": "warm"}
    part = {"type": "text", "text": "yes"}
    for plain, odd in [
        ({"content": "yes"}, {"content": "yes", **LIBRARY}),
        ({"content": "yes"}, {"content": "yes", "tool_calls": [], "reasoning_content": None, "name": None}),
        ({"content": "yes"}, {"content": [{**part, "annotations": None, "cache_control": {"type": "x"}, "parsed": 1}]}),
        ({"content": ""}, {**LIBRARY, "content": None}),
        ({"tool_calls": [call]}, {**LIBRARY, "content": None, "tool_calls": [odd_call]}),
        ({"tool_calls": [call]}, {"tool_calls": [{**call, "id": None, "type": None, "function": {"name": "weather"}}]}),
    ]:
        turns = [
            [user, {"role": "assistant", **each}, {**tool, **more}] for each, more in [(plain, {}), (odd, {"x": 1})]
        ]
        assert rendered(served, turns[0], None) == rendered(served, turns[1], None)


def cut(cutter: Parts, text: str) -> list[Part]:
    """An answer that comes in pieces."""
    places = sorted(random.choices(range(len(text) + 1), k=random.randint(0, 12)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [part for n, piece in enumerate(pieces, 1) for part in cutter.add(piece, last=n == len(pieces))]


def parts(served: ServedModel, text: str) -> list[Part]:
    return cut(served.parts(served.reader.encode("<user>a<assistant>"), [TOOL]), text)


def test_answers_are_cut_into_parts(served: ServedModel) -> None:
    text = '<think>let me see</think>I ask.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    for _ in range(30):
        found = parts(served, text)
        calls = [part for part in found if isinstance(part, ToolCall)]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Köln"})]
        thought = "".join(part for part in found if isinstance(part, ReasoningText))
        said = "".join(part for part in found if isinstance(part, str) and not isinstance(part, ReasoningText))
        assert (thought, said.strip()) == ("let me see", "I ask.")


GOOD = {"name": "weather", "arguments": {"city": "Köln"}}
MALFORMED = [
    '{"name": "f", "arguments": {"re": "\\d+"}}',
    '{"name": "f"}',
    '{"name": "f", "parameters": {}}',
    '{"name": "f", "arguments": {"a": 1}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": "\\ud800"}',
    '{"name": 5, "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    json.dumps({"name": "f" * 257, "arguments": {}}),
    json.dumps([GOOD, {"name": "f"}]),
    json.dumps(GOOD) + "\n" + json.dumps(GOOD),
    '["f"]',
    "[" * 100_000,
    '{"name": ' + "1" * 5000 + "}",
    "null",
    "5",
    "",
    "weather(Köln)",
]


def said(found: list[Part]) -> str:
    return "".join(part for part in found if isinstance(part, str) and not isinstance(part, ReasoningText))


@pytest.mark.parametrize("call", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("end", ["</tool_call>", "</tool_call> Is it?\n", ""])
def test_a_malformed_call_is_text_as_it_was_written(call: str, end: str, served: ServedModel) -> None:
    for _ in range(3):
        written = f"I ask.\n <tool_call>{call}{end}"
        found = parts(served, f"<think>hm</think>{written}")
        assert said(found) == written and not any(isinstance(part, ToolCall) for part in found)
        assert "".join(part for part in found if isinstance(part, ReasoningText)) == "hm"
    if not end:
        return
    # Those beside it are calls, and what the template takes for their beginning is none of the text.
    good = f"<tool_call>{json.dumps(GOOD)}</tool_call>"
    found = parts(served, f"{good}{written}{good}")
    assert said(found) == written.rstrip() and sum(isinstance(part, ToolCall) for part in found) == 2


def test_what_ends_within_a_call_is_no_error(served: ServedModel) -> None:
    for _ in range(10):
        found = parts(served, 'Yes. <tool_call>{"name": "wea')
        assert said(found) == 'Yes. <tool_call>{"name": "wea' and not any(isinstance(part, ToolCall) for part in found)


def test_templates_may_read_several_calls_at_once(served: ServedModel) -> None:
    calls = {
        "open": "[CALLS]",
        "close": "<end>",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    }
    template = {**ANSWERS, "fields": {**ANSWERS["fields"], "tool_calls": calls}}
    for _ in range(5):
        found = cut(TemplateParts(template, "<assistant>", [TOOL]), "Now [CALLS]" + json.dumps([GOOD, GOOD]))
        assert said(found) == "Now " and [part.name for part in found if isinstance(part, ToolCall)] == 2 * ["weather"]
        for call in ("[5]", '[{"name": "f"}]', "{}"):
            assert said(cut(TemplateParts(template, "<assistant>", [TOOL]), f"[CALLS]{call}")) == f"[CALLS]{call}"


def test_other_fields_that_cannot_be_read(served: ServedModel) -> None:
    """Whatever a model's own template has: what was not given out yet comes as text, and nothing twice."""
    fields = {
        "rating": {"open": "<r>", "close": "</r>", "content": "int"},
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "float"},
        "plan": {"open": "<plan>", "close": "</plan>", "content": "json", "optional": False},
        "content": {"content": "text"},
    }
    template = {**ANSWERS, "fields": fields}
    for _ in range(5):
        found = cut(TemplateParts(template, "<assistant>", []), "<think>so</think>a<r>b</r>c<plan>{</plan>d")
        assert said(found) == "ac<plan>{</plan>d"
        assert "".join(part for part in found if isinstance(part, ReasoningText)) == "so"


def test_a_prompt_is_no_part_of_the_answer(served: ServedModel) -> None:
    """Not even where the template looks for another beginning than the prompt has, as with a model's new one."""
    for prefix in ("<user>hm <tool_call>{</tool_call>", "<user>hm<assistant><think>"):
        template = {**ANSWERS, "start_anchor": "<other>"}
        found = cut(TemplateParts(template, prefix, []), "so</think>Yes.")
        thinks = prefix.endswith("<think>")
        assert said(found) == ("Yes." if thinks else "so</think>Yes.")
        assert any(isinstance(part, ReasoningText) for part in found) == thinks
    # A mark of a user's that nothing ends, and blanks that may begin one.
    for prefix in ("<user>hm <tool_call>{", "<user>hm\n"):
        assert said(cut(TemplateParts(template, prefix, []), "Yes. No.")) == "Yes. No."


@pytest.mark.parametrize("most", [1, 2, 5])
def test_an_array_has_no_more_calls_than_may_be_sent_back(served: ServedModel, most: int) -> None:
    words = from_tokenizer(served.tokenizer)
    form = Form.calls([("f", {"type": "object", "properties": {}})], words, most=most)

    def fits(calls: int) -> bool:
        state, text = form.begin(), "[" + ",".join(calls * ['{"name":"f","parameters":{}}']) + "]"
        for token in served.tokenizer.encode(text, add_special_tokens=False):
            if not state.allowed(words.vocab_size)[token]:
                return False
            state.take(token)
        return True

    assert [fits(calls) for calls in range(1, most + 2)] == [*[True] * most, False]


def test_an_array_is_cut_into_calls() -> None:
    """Whatever its strings have of what it is made of; one that is cut off has all calls before."""
    for _ in range(50):
        odd = ["".join(random.choices('ab\\"{}[],:é\n', k=random.randint(0, 9))) for _ in range(4)]
        calls = [{"name": random.choice(odd), "parameters": {random.choice(odd): [{}, odd[1]]}} for _ in range(3)]
        text = json.dumps(calls, separators=(",", ":"))
        found = [(call.name, json.loads(call.arguments)) for call in cut(CallsParts(), text)]
        assert found == [(call["name"], call["parameters"]) for call in calls]
        last = len(json.dumps(calls[-1], separators=(",", ":")))
        assert len(cut(CallsParts(), text[: -1 - random.randint(1, last)])) == 2
        assert len(cut(CallsParts(), text[:-1])) == 3
