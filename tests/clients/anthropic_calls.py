"""Calls by Anthropic's own client; its environment runs this file: `python anthropic_calls.py URL MODEL`."""

import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
asked = {"model": model, "max_tokens": 60, "messages": [{"role": "user", "content": "aa ab"}]}
schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
tools = [{"name": "look", "input_schema": {**schema, "additionalProperties": False}}]

said = client.messages.create(**asked, system="ac")
assert said.content[0].type == "text" and said.usage.output_tokens <= 60
assert client.messages.count_tokens(model=model, messages=asked["messages"]).input_tokens > 0

choice = {"type": "any", "disable_parallel_tool_use": True}
with client.messages.stream(**asked, tools=tools, tool_choice=choice) as stream:
    called = stream.get_final_message()
call = called.content[0]
assert called.stop_reason == "tool_use" and call.name == "look" and call.input["kind"] in ("a", "b")

result = {"type": "tool_result", "tool_use_id": call.id, "content": "none"}
messages = [*asked["messages"], {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
with client.messages.stream(model=model, max_tokens=8, messages=messages, tools=tools) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert "".join(block.text for block in final.content if block.type == "text") == text
assert final.stop_reason in ("max_tokens", "end_turn") and final.usage.output_tokens <= 8

image = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
try:
    client.messages.create(model=model, max_tokens=8, messages=[{"role": "user", "content": [image]}])
except anthropic.BadRequestError as error:
    assert error.body["error"]["type"] == "invalid_request_error" and "'image'" in error.message
else:
    raise AssertionError("an image was taken")
