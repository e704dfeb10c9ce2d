"""Calls by litellm, by OpenAI's and by Anthropic's endpoints: `python litellm_calls.py URL MODEL`."""

import sys

import litellm

url, model = sys.argv[1:]
asked = [{"role": "user", "content": "aa ab"}]
schema = {
    "type": "object",
    "properties": {"deep": {"type": "boolean"}},
    "required": ["deep"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
    options = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "num_retries": 0, "timeout": 120}
    said = litellm.completion(messages=asked, max_tokens=8, **options).choices[0].message
    again = litellm.completion(messages=[*asked, said, *asked], max_tokens=4, **options)
    assert again.usage.completion_tokens <= 4
    parts = litellm.completion(messages=asked, max_tokens=8, stream=True, **options)
    assert any(part.choices[0].finish_reason for part in parts)
    called = litellm.completion(messages=asked, tools=tools, tool_choice="required", max_tokens=200, **options)
    message = called.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "none"} for call in message.tool_calls]
    litellm.completion(messages=[*asked, message, *results], tools=tools, max_tokens=4, **options)
