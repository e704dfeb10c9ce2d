"""Answers of any grammar, by vLLM's names for them, and of schemas that llguidance cannot hold to the letter."""

import json
import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
from llguidance.hf import from_tokenizer
from transformers.cli.serving.utils import ToolCall

from megakv.serving.form import Form
from megakv.serving.http.chat_schemas import ChatBody, TextFormat
from megakv.serving.http.either import EitherParts, Opening
from megakv.serving.http.errors import ApiError
from megakv.serving.http.held import held_to
from megakv.serving.http.settings import HttpSettings
from megakv.serving.schema import check_regex, holdable
from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error, running
from tests.unit.serving.tokenizers import byte_level

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EBNF = 'root ::= item ("," item)? \nitem ::= [a-c] "-" ("x" | "yy")'
LARK = 'start: item ("," item)?\nitem: /[a-c]/ "-" ("x" | "yy")'
ITEMS = re.compile(r"[a-c]-(x|yy)(,[a-c]-(x|yy))?")


@pytest.fixture
def served(bytes_served: Served) -> Served:
    return bytes_served


def ask(served: Served, path: str, **fields: Any) -> httpx.Response:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": prose(5)}], "max_tokens": 200}
    if path == COMPLETIONS:
        given = {"prompt": prose(5), "max_tokens": 200}
    elif path == RESPONSES:
        given = {"input": prose(5), "max_output_tokens": 200}
    body = {"model": NAME, "temperature": random.choice([0, 1]), **given, **fields}
    return httpx.post(f"{served.url}{path}", json=body, timeout=MOST_S)


def text_of(served: Served, path: str, **fields: Any) -> str:
    answer = ask(served, path, **fields)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    if path == RESPONSES:
        text: str = value["output"][-1]["content"][0]["text"]
        return text
    (choice,) = value["choices"]
    assert choice["finish_reason"] == "stop"
    found: str = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_answers_are_of_the_form(path: str, served: Served) -> None:
    words, phone = [f'{prose(1)} "é\\', prose(2)], r"\+[0-9]{2} [1-9][0-9]{3,5}"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for named in (
        lambda name, value: {"structured_outputs": {name: value}},
        lambda name, value: {f"guided_{name}": value},
    ):
        assert text_of(served, path, **named("choice", words)) in words
        assert re.fullmatch(phone, text_of(served, path, **named("regex", phone)))
        assert ITEMS.fullmatch(text_of(served, path, **named("grammar", random.choice([EBNF, LARK]))))
        given = random.choice([schema, json.dumps(schema)])
        assert json.loads(text_of(served, path, **named("json", given)))["a"] in (1, 2)


def test_any_object_with_a_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = text_of(served, CHAT, response_format={"type": "json_object", "schema": schema})
    assert json.loads(text)["a"] in ("x", "y")


def test_calls_come_before_a_form_and_a_form_where_no_tools_are_told(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answer = ask(served, CHAT, tools=tools, tool_choice=choice, response_format=form, parallel_tool_calls=False)
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": "{}"}
    assert text_of(served, CHAT, tools=tools, tool_choice="none", response_format=form) == "7"
    # Of this model nobody knows how it writes calls: none of its texts is one.
    assert text_of(served, CHAT, tools=tools, response_format=form) == "7"
    assert text_of(served, CHAT, tools=tools, guided_choice=["a"]) == "a"
    body = ChatBody.model_validate({"model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": tools})
    for field, value in (("guided_choice", ["a"]), ("response_format", TextFormat(type="json_object"))):
        with pytest.raises(ApiError, match="tool_choice"):
            held_to(body.model_copy(update={field: value}), None, value if field == "response_format" else None)


@pytest.mark.parametrize(
    ("schema", "begins"),
    [
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 3}, "["),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}, "{"),
        ({"type": "string", "maxLength": 5000}, '"'),
        ({"type": "string", "maxLength": 10**9}, '"'),
        ({"type": "string", "format": "binary"}, '"'),
        ({"type": "string", "pattern": "^(?!x)a"}, '"'),
        ({"anyOf": [{"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, {"type": "null"}]}, ("n", '"')),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, '"'),
        (
            {"type": "object", "properties": {"uniqueItems": {"enum": [3]}}, "required": ["uniqueItems"]},
            '{"uniqueItems":3',
        ),
        ({"enum": [{"format": "x", "uniqueItems": 3}]}, '{"format":"x","uniqueItems":3}'),
    ],
)
def test_ordinary_schemas_are_taken(schema: dict[str, Any], begins: str, served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(served, CHAT, response_format=form, max_tokens=40)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].startswith(begins)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("sign", ["", "u"])
def test_numbers_of_so_many_bits_are_held(bits: int, sign: str) -> None:
    form = Form.json({"type": "integer", "format": f"{sign}int{bits}"}, tokenizer := from_tokenizer(byte_level()))
    least, most = (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for number in (least - 1, least, random.randint(least, most), most, most + 1, most * 1000):
        tokens = tokenizer.tokenize_str(str(number))
        taken = form.matcher.deep_copy().validate_tokens([*tokens, tokenizer.eos_token])
        assert (taken == len(tokens) + 1) == (least <= number <= most), number


def test_what_is_held_stays_as_it_is() -> None:
    schema = {
        "$defs": {"pattern": {"type": "string", "pattern": "^a+$", "format": "uuid"}},
        "properties": {"format": {"$ref": "#/$defs/pattern"}, "list": {"items": {"type": "integer", "minimum": 3}}},
        "default": {"uniqueItems": True},
        "const": [{"format": "none"}],
    }
    assert holdable(schema) == schema
    low = {"type": "integer", "format": "int8", "minimum": -5, "maximum": 1000}
    assert holdable({"items": [low]}) == {"items": [{"type": "integer", "minimum": -5, "maximum": 127}]}


@pytest.mark.parametrize(
    "text", [r"(a{1000}){1000}", r"((a|b){100}){100}", r"a{99999999999}", r"(?:[a-z]{64,}\d{300}){60}"]
)
def test_expressions_that_are_too_large_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: 10000"):
        check_regex(text)
    with pytest.raises(ValueError, match="allowed: 10000"):
        holdable({"properties": {"a": {"type": "string", "pattern": text}}})


@pytest.mark.parametrize(
    "text", [r"\d{4}-\d{2}", r"[^]{9}]{1000}", r"\p{L}{500}", "(", "[", "a{", r"\{90000\}", "x{,3}"]
)
def test_others_are_not(text: str) -> None:
    check_regex(text)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?!x)a"}}, "look-around"),
        ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs.grammar"),
        ({"guided_grammar": "root ::= ((("}, "guided_grammar"),
        ({"guided_grammar": "start: a\na: B{1000}\nB: /c{1000}/"}, "repetitions"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": {"type": "thing"}}, "guided_json"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"structured_outputs": {"choice": [""]}}, "choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "held to one thing"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "held to one thing"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_json": {"not": {"type": "string"}}}, "not"),
        ({"guided_json": {"type": "string", "minLength": 1e9}}, "minLength"),
        ({"response_format": {"type": "text", "schema": {}}}, "schema"),
    ],
)
def test_what_cannot_be_is_said(served: Served, fields: dict[str, Any], says: str) -> None:
    assert says in check_error(ask(served, CHAT, **{"max_tokens": 5, **fields}), 400)["message"]


MARKED = {
    "text": ("<tool_call>", {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"}),
    "special": ("<user>", {"open": "<user>", "close": "<assistant>"}),
}


@pytest.mark.parametrize("kind", MARKED)
def test_json_or_calls_whichever_the_model_begins(kind: str, bytes_served: Served) -> None:
    """With a mark that is text, or a special token."""
    opening, marks = MARKED[kind]
    transform = {"type": "function", "function": "{content}"}
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {"tool_calls": {**marks, "repeats": True, "content": "json", "transform": transform},
                   "content": {"content": "text"}},
    }  # fmt: skip
    model = replace(bytes_served.model, answer_template=template)
    found = model.opening
    assert found is not None and found.text == opening
    schema = {"type": "object", "properties": {"a": {"const": f"x {opening}"}}, "required": ["a"]}
    form = model.form(partial(Form.json_or, found.lark, {**schema, "additionalProperties": False}), "response_format")
    call = f'{opening}{{"name": "f", "arguments": {{"b": 1}}}}{marks["close"]}'
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    for text, goes_on in (
        (json.dumps({"a": f"x {opening}"}).replace(": ", ":"), False),
        (call, True),
        (call * 2, True),
    ):
        state, tokens = form.begin(), encode(text)
        if not goes_on and kind == "special":
            continue  # In a text it is no special token.
        for token in tokens:
            assert state.allowed(model.vocabulary)[token]
            state.take(token)
        assert state.allowed(model.vocabulary)[min(model.end_ids)] and not state.problem
        for size in (1, 4, 1000):
            parts = EitherParts(opening, model.parts((), []))
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            told = [part for piece in pieces for part in parts.add(piece, last=False)] + parts.add("", last=True)
            if goes_on:
                calls = [part for part in told if isinstance(part, ToolCall)]
                assert [(each.name, json.loads(each.arguments)) for each in calls] == [("f", {"b": 1})] * text.count(
                    "f"
                )
            else:
                assert "".join(map(str, told)) == text
    assert not form.begin().allowed(model.vocabulary)[encode("x")[0]]


@pytest.mark.parametrize(
    ("pattern", "opening"),
    [
        (r"\s*<tool_call>\s*<function=(?P<name>[^>]+)>", "<tool_call>"),
        (r"<\|tool_call>call:(?P<name>\w+)", "<|tool_call>call:"),
        (r"<a|<b", None),
        (r"\s*[a-c]+", None),
        (r"<too?", "<to"),
        (r"\{json", None),
    ],
)
def test_what_calls_begin_with(pattern: str, opening: str | None) -> None:
    found = Opening.of({"fields": {"tool_calls": {"open_pattern": pattern}}}, byte_level())
    assert (None if found is None else found.text) == opening
    assert Opening.of(None, byte_level()) == Opening("", "")


def test_a_server_answers_either(bytes_served: Served) -> None:
    """Whatever a model of random weights begins."""
    loop, tools = bytes_served.loop, [{"type": "function", "function": {"name": "f"}}]
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {
            "tool_calls": {"open": "<call>", "close": "</call>", "content": "text"},
            "content": {"content": "text"},
        },
    }
    model = replace(bytes_served.model, answer_template=template)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7, 8]}}}
    with running((loop, model), HttpSettings(NAME, port=0)) as url:
        served = replace(bytes_served, url=url)
        begun = [id for text, id in model.tokenizer.get_vocab().items() if text.startswith("<")]
        for bias in (-100, 100):
            fields: dict[str, Any] = {"tools": tools, "response_format": form, "temperature": 0, "max_tokens": 8}
            answer = ask(served, CHAT, **fields, logit_bias={str(token): bias for token in begun})
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["message"]["content"]
            assert text in ("7", "8") if bias < 0 else (text or "<call>").startswith("<call>"), text


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: A " " B\nA: "x"\nB: "y"\n%ignore /[ ]+/', "%ignore is not held"),
        ("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(4499)) + '\nr4499: "a"', "rules; allowed: 1000"),
    ],
)
def test_grammars_that_would_end_the_server_are_refused(served: Served, grammar: str, says: str) -> None:
    """One never came to a token, the other went through the stack."""
    assert says in check_error(ask(served, COMPLETIONS, guided_grammar=grammar), 400)["message"]
