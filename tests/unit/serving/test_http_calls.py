"""Calls of tools that an answer has to be, by OpenAI's own client, whatever the model would rather say."""

import random
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error


class Place(BaseModel):
    kind: Literal["city", "sea"]


class Weather(BaseModel):
    """With a definition to which it refers, as nested models have."""

    place: Place
    today: bool


class Stamp(BaseModel):
    """Refers to another one of the same name."""

    class Place(BaseModel):
        number: Literal[1, 22]

    place: Place


MODELS: dict[str, type[BaseModel]] = {"weather": Weather, 'odd "é{,"parameters":': Stamp}
NOTHING: Any = {"type": "function", "function": {"name": "nothing"}}
TOOLS: list[Any] = [*(openai.pydantic_function_tool(model, name=name) for name, model in MODELS.items()), NOTHING]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture
def served(bytes_served: Served) -> Served:
    return bytes_served


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def options(**more: Any) -> dict[str, Any]:
    """The model's weights are random: so would its answers be."""
    messages = [{"role": "user", "content": prose(random.randint(1, 20))}]
    return {"model": NAME, "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 300, **more}


def without(served: Served, letter: str) -> dict[str, int]:
    """A bias by which a letter is never said."""
    tokens = served.model.tokenizer.get_vocab().items()
    return {str(token): -100 for text, token in tokens if letter in text}


def check_call(call: Any) -> None:
    """That it is one of the tools', with arguments of its schema."""
    assert call.type == "function" and call.id.startswith("call_")
    if call.function.name == "nothing":
        assert call.function.arguments == "{}"
    else:
        MODELS[call.function.name].model_validate_json(call.function.arguments)


@pytest.mark.parametrize("name", [*MODELS, "nothing"])
def test_a_named_function_is_called(name: str, served: Served) -> None:
    asked = options(tool_choice=named(name), n=2, temperature=random.choice([0, 1]), logprobs=True)
    for choice in served.client().chat.completions.create(**asked).choices:
        assert choice.finish_reason == "stop" and choice.message.content is None and choice.logprobs.content
        (call,) = choice.message.tool_calls
        assert call.function.name == name
        check_call(call)


def test_a_named_function_is_streamed(served: Served) -> None:
    asked = options(tool_choice=named("weather"))
    whole = served.client().chat.completions.create(**asked).choices[0].message.tool_calls[0]
    chunks = [
        chunk.choices[0] for chunk in served.client().chat.completions.create(**asked, stream=True, logprobs=True)
    ]
    assert all(chunk.delta.content is None for chunk in chunks)
    first, *others = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (first.index, first.type, first.function.name) == (0, "function", "weather") and first.id
    assert len(others) > 3 and all((each.index, each.id, each.function.name) == (0, None, None) for each in others)
    assert "".join(each.function.arguments for each in [first, *others]) == whole.function.arguments
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert sum(len(chunk.logprobs.content) for chunk in chunks if chunk.logprobs) > 3


def test_what_a_limit_cuts_is_given_as_it_is(served: Served) -> None:
    create = served.client().chat.completions.create
    cut = create(**options(tool_choice=named("weather"), max_tokens=9)).choices[0]
    assert cut.finish_reason == "length"
    arguments = cut.message.tool_calls[0].function.arguments
    assert arguments and '{"place":{"kind":"'.startswith(arguments[:18])
    cut = create(**options(tool_choice="required", max_tokens=3)).choices[0]
    assert cut.finish_reason == "length" and not cut.message.tool_calls


def test_calls_are_required(served: Served) -> None:
    for _ in range(5):
        asked = options(tool_choice="required", temperature=1, parallel_tool_calls=False)
        choice = served.client().chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check_call(call)


def test_several_calls_are_required(served: Served) -> None:
    """An array that the model is kept from ending has all calls that are whole; streamed, the same ones."""
    asked = options(tool_choice="required", logit_bias=without(served, "]"))
    choice = served.client().chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "length" and len(choice.message.tool_calls) > 1
    for call in choice.message.tool_calls:
        check_call(call)
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
    # The client's own reader of streams would not have an answer that was cut off.
    chunks = [chunk.choices[0] for chunk in served.client().chat.completions.create(**asked, stream=True)]
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.index for call in streamed] == list(range(len(streamed)))
    functions = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert [(call.function.name, call.function.arguments) for call in streamed] == functions
    assert chunks[-1].finish_reason == "length"


def test_the_clients_reader_of_streams(served: Served) -> None:
    asked = options(tool_choice="required", parallel_tool_calls=False)
    with served.client().chat.completions.stream(**asked) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    # Arguments of no parameters, which the client leaves as text, are none.
    if call.function.name != "nothing":
        assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])
    check_call(call)


def test_responses(served: Served) -> None:
    client = served.client()
    asked: dict[str, Any] = {"model": NAME, "input": prose(4), "tools": FLAT, "temperature": 0}
    choice: Any = {"type": "function", "name": "weather"}
    first = client.responses.create(**asked, tool_choice=choice, max_output_tokens=100)
    (call,) = first.output
    assert call.type == "function_call" and (call.name, call.status) == ("weather", "completed")
    Weather.model_validate_json(call.arguments)
    assert first.tool_choice == openai.types.responses.ToolChoiceFunction(**choice)
    answer: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "warm"}]
    assert client.responses.create(model=NAME, input=answer, previous_response_id=first.id, max_output_tokens=2).output
    with client.responses.stream(**asked, tool_choice=choice, max_output_tokens=100) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_response().output
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added" and kinds.count("response.function_call_arguments.delta") > 3
    assert streamed.type == "function_call" and streamed.arguments == call.arguments
    (cut,) = client.responses.create(**asked, tool_choice=choice, max_output_tokens=3).output
    assert cut.type == "function_call" and cut.status == "incomplete" and cut.arguments
    required = client.responses.create(
        **asked, tool_choice="required", parallel_tool_calls=False, max_output_tokens=200
    )
    assert [item.type for item in required.output] == ["function_call"] and not required.parallel_tool_calls


def tool(parameters: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": {"name": "bad", "parameters": parameters}}]


@pytest.mark.parametrize("choice", ["required", named("bad")])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tools": []}, "tool_choice: there are no tools to call; give some"),
        ({"tools": None}, "tool_choice: there are no tools to call; give some"),
        ({"tools": tool({"type": "thing"})}, "parameters of 'bad': type = 'thing': allowed: 'object'"),
        ({"tools": tool({"properties": {"a": {"type": "thing"}}})}, "parameters of 'bad': Invalid type: thing"),
        ({"tools": tool({"minProperties": 200_000})}, "parameters of 'bad': minProperties = 200000"),
        ({"tools": tool({"description": "x" * 70_000})}, "longer than the model's context"),
        ({"ignore_eos": True, "tools": tool({})}, "tool_choice: it does not go together with ignore_eos"),
        ({"stop": ["}"], "tools": tool({})}, "tool_choice: calls are not cut off by stop"),
    ],
)
def test_what_cannot_be_is_said(choice: Any, body: dict[str, Any], says: str, served: Served) -> None:
    asked = options(tool_choice=choice) | body
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=MOST_S)
    assert says in check_error(answer, 400)["message"]


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("other", "'weather', "),
        ("sometimes", "tool_choice: allowed: 'auto', 'none', 'required'"),
        ({"type": "allowed_tools"}, "tool_choice: allowed: 'auto', 'none', 'required'"),
        ({"type": "function"}, "tool_choice: allowed: 'auto', 'none', 'required'"),
    ],
)
def test_a_choice_that_is_none(path: str, choice: Any, says: str, served: Served) -> None:
    flat = path == "responses"
    body: Any = {"input": "x", "tools": FLAT} if flat else {"messages": options()["messages"], "tools": TOOLS}
    if choice == "other":
        choice = {"type": "function", "name": "other"} if flat else named("other")
    answer = httpx.post(f"{served.url}/v1/{path}", json={"model": NAME, "tool_choice": choice, **body}, timeout=MOST_S)
    error = check_error(answer, 400)
    assert says in error["message"] and error["param"] == "tool_choice"
