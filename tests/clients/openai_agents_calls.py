"""Calls by OpenAI's Agents SDK, by chat completions and by responses: `python openai_agents_calls.py URL MODEL`."""

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

looked = []


@function_tool
def look(deep: bool) -> str:
    """Look for something."""
    looked.append(deep)
    return "none"


url, model = sys.argv[1:]
set_tracing_disabled(True)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    served = kind(model=model, openai_client=client)
    settings = ModelSettings(tool_choice="required", max_tokens=200, parallel_tool_calls=False)
    agent = Agent(name="a", instructions="ac", model=served, model_settings=settings, tools=[look])
    looked.clear()
    # The tool is asked for once; the turn behind its result is free.
    Runner.run_sync(agent, "aa ab", max_turns=3)
    assert looked
