"""Calls by instructor, with tools and with JSON: `python instructor_calls.py URL MODEL`."""

import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict


class Kind(BaseModel):
    model_config = ConfigDict(extra="forbid")

    deep: bool


url, model = sys.argv[1:]
plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    asked = [{"role": "user", "content": "aa ab"}]
    found = client.chat.completions.create(
        model=model, messages=asked, response_model=Kind, max_tokens=200, max_retries=1
    )
    assert isinstance(found, Kind)
