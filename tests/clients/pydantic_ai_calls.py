"""Calls by Pydantic's agents, by chat completions and by responses: `python pydantic_ai_calls.py URL MODEL`."""

import sys

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Kind(BaseModel):
    model_config = ConfigDict(extra="forbid")

    deep: bool


url, model = sys.argv[1:]
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    served = kind(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = {"max_tokens": 100, "timeout": 120}
    agent = Agent(served, output_type=NativeOutput(Kind), model_settings=settings, instructions="ac")
    first = agent.run_sync("aa ab")
    assert isinstance(first.output, Kind)
    assert isinstance(agent.run_sync("ab", message_history=first.all_messages()).output, Kind)
