"""Calls by LangChain's client of OpenAI's endpoints: `python langchain_calls.py URL MODEL`."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Kind(BaseModel):
    """What it is."""

    model_config = ConfigDict(extra="forbid")

    deep: bool


url, model = sys.argv[1:]
for responses in (False, True):
    chat = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120, max_tokens=60,
        use_responses_api=responses,
    )  # fmt: skip
    asked = [HumanMessage("aa ab")]
    said = chat.invoke(asked)
    chat.invoke([*asked, said, *asked])
    assert [*chat.stream(asked)]
    assert isinstance(chat.with_structured_output(Kind, method="json_schema").invoke(asked), Kind)
    tools = chat.bind_tools([Kind], tool_choice="Kind")
    called = tools.invoke(asked)
    results = [ToolMessage("none", tool_call_id=call["id"]) for call in called.tool_calls]
    assert results
    chat.invoke([*asked, called, *results])
