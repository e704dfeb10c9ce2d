"""Calls by OpenAI's own client; its environment runs this file: `python openai_calls.py URL MODEL`."""

import sys

import openai
from pydantic import BaseModel, ConfigDict


class Kind(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: bool


url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
asked = [{"role": "user", "content": "aa ab"}]
schema = {
    "type": "object",
    "properties": {"deep": {"type": "boolean"}},
    "required": ["deep"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
assert client.models.list().data[0].id == model

# Every turn comes back as the client's library has it.
chat = client.chat.completions.create(model=model, messages=asked, max_tokens=8, logprobs=True, top_logprobs=2)
assert len(chat.choices[0].logprobs.content) <= chat.usage.completion_tokens
for message in (chat.choices[0].message, chat.choices[0].message.model_dump()):
    client.chat.completions.create(model=model, messages=[*asked, message, *asked], max_tokens=4)

parsed = client.chat.completions.parse(model=model, messages=asked, response_format=Kind, max_tokens=60)
assert isinstance(parsed.choices[0].message.parsed, Kind)
client.chat.completions.create(model=model, messages=[*asked, parsed.choices[0].message, *asked], max_tokens=4)

called = client.chat.completions.create(
    model=model, messages=asked, tools=tools, tool_choice="required", max_tokens=200
)
message = called.choices[0].message
results = [{"role": "tool", "tool_call_id": call.id, "content": "none"} for call in message.tool_calls]
client.chat.completions.create(model=model, messages=[*asked, message, *results], tools=tools, max_tokens=4)

options = {"model": model, "messages": asked, "max_tokens": 8, "temperature": 0}
parts = [
    part for part in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
]
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert text == client.chat.completions.create(**options).choices[0].message.content and parts[-1].usage
# More than there is room for is a ceiling.
assert client.chat.completions.create(
    model=model, messages=asked, max_tokens=1_000_000, stop="a"
).usage.completion_tokens

look = [{"type": "function", "name": "look", "parameters": schema, "strict": True}]
first = client.responses.create(model=model, input="aa", tools=look, tool_choice="required", max_output_tokens=200)
outputs = [
    {"type": "function_call_output", "call_id": item.call_id, "output": "none"}
    for item in first.output if item.type == "function_call"
]  # fmt: skip
assert outputs
sent = [*asked, *(item.model_dump() for item in first.output), *outputs]
second = client.responses.create(model=model, input=sent, max_output_tokens=8)
client.responses.create(model=model, input=asked, previous_response_id=second.id, max_output_tokens=4)
events = list(client.responses.create(model=model, input="ab", max_output_tokens=8, stream=True))
text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
assert events[-1].type in ("response.completed", "response.incomplete")
assert text == events[-1].response.output_text

try:
    image = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": [image]}], max_tokens=4)
except openai.BadRequestError as error:
    assert "image" in error.message
else:
    raise AssertionError("an image was taken")
