"""Reasoning, text and calls as families of models write them, by what stands in their chat templates."""

import json
import random
from typing import Any

import pytest
from transformers.cli.serving.utils import ReasoningText, ToolCall

from megakv.serving.http import answer_forms
from megakv.serving.http.answer_forms import FORMS, known_form
from megakv.serving.http.parts import Contents, Part, TemplateParts

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
ARGUMENTS = {"city": "Köln", "days": 2}
GIVEN = json.dumps(ARGUMENTS, ensure_ascii=False)
PROMPT = "<user> <tool_call>[TOOL_CALLS]"
CALL = ("get_weather", ARGUMENTS)
OBJECT = f'{{"name": "get_weather", "arguments": {GIVEN}}}'
XML = "<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
DEEPSEEK_V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{GIVEN}\n```<｜tool▁call▁end｜>"
DEEPSEEK_V31 = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{GIVEN}<｜tool▁call▁end｜>"
HARMONY = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{GIVEN}"
CHAT_ML, GRANITE = "<|im_start|>assistant\n", "<|start_of_role|>assistant<|end_of_role|>"
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALLS = f"<tool_call>\n{OBJECT}\n</tool_call>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
NAMED = f"[TOOL_CALLS]get_weather[ARGS]{GIVEN}[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{GIVEN}</s>"
LLAMA_CALL = f'"name": "get_weather", "parameters": {GIVEN}'
LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"

EXAMPLES: list[tuple[str, str, str, str, str, list[Any]]] = [
    # A form, the end of a prompt, an answer; its reasoning, its text and its calls.
    ("HERMES", CHAT_ML, f"Now.\n{CALLS}\n{CALLS}<|im_end|>", "", "Now.", [CALL, CALL]),
    ("HERMES", CHAT_ML, "<think>\nhm\n</think>\n\nYes.<|im_end|>", "hm", "Yes.", []),
    ("HERMES", f"{CHAT_ML}<think>\n", f"hm</think>\n\n<tool_call>{OBJECT}</tool_call>", "hm", "", [CALL]),
    (
        "QWEN_CODER",
        CHAT_ML,
        f"Now.\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n{XML}\n</tool_call><|im_end|>",
        "",
        "Now.",
        [CALL, CALL],
    ),
    ("QWEN_CODER", CHAT_ML, f"Now.\n\n{XML}\n</tool_call>", "", "Now.", [CALL]),
    ("LLAMA_3", LLAMA, f"{{{LLAMA_CALL}}}<|eot_id|>", "", "", [CALL]),
    ("LLAMA_3", LLAMA, f'<|python_tag|>{{"type": "function", {LLAMA_CALL}}}<|eom_id|>', "", "", [CALL]),
    ("LLAMA_3", LLAMA, 'It is {"name": "a"} here.<|eot_id|>', "", 'It is {"name": "a"} here.', []),
    ("LLAMA_3", LLAMA, '{"name": "Ann", "age": 5}', "", '{"name": "Ann", "age": 5}', []),
    ("MISTRAL", "[/INST]", f"[TOOL_CALLS] [{OBJECT}, {OBJECT}]</s>", "", "", [CALL, CALL]),
    ("MISTRAL", "[/INST]", "Yes.</s>", "", "Yes.", []),
    ("MISTRAL_NAMED", "[/INST]", f"Now.{NAMED}", "", "Now.", [CALL, CALL]),
    ("MISTRAL_NAMED", "[/INST]", "[THINK]hm[/THINK]Yes.</s>", "hm", "Yes.", []),
    (
        "DEEPSEEK",
        "<｜Assistant｜>",
        f"Now.{CALLS_BEGIN}{DEEPSEEK_V3}\n{DEEPSEEK_V3}{CALLS_END}<｜end▁of▁sentence｜>",
        "",
        "Now.",
        [CALL, CALL],
    ),
    (
        "DEEPSEEK",
        "<｜Assistant｜></think>",
        f"{CALLS_BEGIN}{DEEPSEEK_V31}{DEEPSEEK_V31}{CALLS_END}",
        "",
        "",
        [CALL, CALL],
    ),
    ("DEEPSEEK", "<｜Assistant｜><think>\n", "hm</think>\n\nYes.", "hm", "Yes.", []),
    ("GLM", "<|assistant|>", f"\n<think>hm</think>\nNow.\n{GLM}\n{GLM}<|observation|>", "hm", "Now.", [CALL, CALL]),
    ("GLM", "<|assistant|>", "<tool_call>get_weather\n</tool_call>", "", "", [("get_weather", {})]),
    ("PHI_MINI", "<|assistant|>", f"<|tool_call|>[{OBJECT}]<|/tool_call|><|end|>", "", "", [CALL]),
    ("PHI_MINI", "<|assistant|>", f"functools[{OBJECT}, {OBJECT}]", "", "", [CALL, CALL]),
    ("PHI", "<|im_start|>assistant<|im_sep|>", "<think>hm</think>Yes.<|im_end|>", "hm", "Yes.", []),
    ("HARMONY", "<|start|>assistant", f"{THOUGHT}<|channel|>final<|message|>Yes.<|return|>", "hm", "Yes.", []),
    ("HARMONY", "<|start|>assistant", f"{THOUGHT}{HARMONY}<|call|>", "hm", "", [CALL]),
    (
        "HARMONY",
        "<|start|>assistant",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{GIVEN}",
        "",
        "",
        [CALL],
    ),
    (
        "HARMONY",
        "<|start|>assistant",
        f"<|channel|>commentary<|message|>Now.<|end|><|start|>assistant{HARMONY}",
        "",
        "Now.",
        [CALL],
    ),
    ("GRANITE_3", GRANITE, f"<|tool_call|>[{OBJECT}, {OBJECT}]<|end_of_text|>", "", "", [CALL, CALL]),
    ("GRANITE_3", GRANITE, "<think>hm</think><response>Yes.</response><|end_of_text|>", "hm", "Yes.", []),
    ("GRANITE_4", GRANITE, f"Now.\n<tool_call>\n{OBJECT}\n</tool_call><|end_of_text|>", "", "Now.", [CALL]),
]


def cut(template: Any, prefix: str, text: str) -> list[Part]:
    cutter = TemplateParts(template, PROMPT + prefix, TOOLS)
    places = sorted(random.choices(range(len(text) + 1), k=random.randint(0, 20)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [part for n, piece in enumerate(pieces, 1) for part in cutter.add(piece, last=n == len(pieces))]


@pytest.mark.parametrize(("name", "prefix", "text", "thought", "content", "calls"), EXAMPLES)
def test_answers_of_families(name: str, prefix: str, text: str, thought: str, content: str, calls: list[Any]) -> None:
    for _ in range(20):
        parts = cut(getattr(answer_forms, name), prefix, text)
        made = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
        assert made == calls
        assert "".join(part for part in parts if isinstance(part, ReasoningText)).strip() == thought
        said = "".join(part for part in parts if isinstance(part, str) and not isinstance(part, ReasoningText))
        assert said.strip() == content


def test_every_form_has_an_example() -> None:
    named = {id(getattr(answer_forms, name)) for name, *_ in EXAMPLES}
    assert named == {id(form) for _, form in FORMS}


def test_forms_are_known_by_chat_templates() -> None:
    for n, (marks, form) in enumerate(FORMS):
        written = list(marks)
        random.shuffle(written)
        text = "{{ bos_token }}" + " ".join(written)
        earlier = next((each for others, each in FORMS[:n] if all(other in text for other in others)), None)
        assert known_form(text) == known_form({"default": "", "tool_use": text}) == (earlier or form)
        assert earlier is None
    for nothing in (None, "", "<start_of_turn>model", "<|im_start|>assistant"):
        assert known_form(nothing) is None


@pytest.mark.parametrize("form", [form for _, form in FORMS], ids=range(len(FORMS)))
def test_whatever_families_write_is_no_error(form: Any) -> None:
    """Examples cut off, mixed, and with parts left out."""
    texts = [text for name, _, text, *_ in EXAMPLES if getattr(answer_forms, name) is form]
    for _ in range(150):
        text = "".join(random.choices(texts, k=2))
        for _ in range(random.randint(1, 4)):
            a, b = sorted(random.choices(range(len(text) + 1), k=2))
            text = random.choice([text[:a] + text[min(b, a + 9) :], text[:b] + text[a:], text[:b]])
        parts = cut(form, "", text)
        for part in parts:
            if isinstance(part, ToolCall):
                assert part.name and isinstance(json.loads(part.arguments), dict)
        # Where content is said to be, there it is.
        contents, at = Contents(form, PROMPT, TOOLS), random.randint(0, len(text))
        places = [place for n, piece in enumerate((text[:at], text[at:])) for place in contents.add(piece, last=n == 1)]
        said = "".join(part for part in parts if isinstance(part, str) and not isinstance(part, ReasoningText))
        assert "".join(text[a:b] for a, b in places) == said, (text, said)
