"""A client of OpenAI's endpoints that notes when every token came. It is the same for all servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from megakv.base.errors import MegaKVError

from .server import NAME

GREEDY = {"temperature": 0.0}


@dataclass
class Reply:
    """An answer as far as it has come; times are of one clock."""

    sent: float = 0.0
    stamps: list[float] = field(default_factory=list)  # When each token came
    pieces: list[str] = field(default_factory=list)  # Tokens as text, where log probabilities were asked for
    progress: list[tuple[float, int]] = field(default_factory=list)  # When so many tokens of the prompt were read
    cached_tokens: int = 0
    left: bool = False  # The client went before the end

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.sent


class Client:
    """Of one server, in an ``async with``."""

    def __init__(self, url: str):
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=f"{url}/v1", timeout=None, limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ending: object) -> None:
        await self._http.aclose()

    async def complete(
        self,
        prompt: list[int],
        new_tokens: int,
        *,
        into: Reply | None = None,
        sampling: Mapping[str, float] = GREEDY,
        pieces: bool = False,
        progress: bool = False,
        leaves: Callable[[Reply], bool] = lambda reply: False,
    ) -> Reply:
        """The answer of that many tokens, as a stream; the connection is closed once the client `leaves`."""
        reply = into or Reply()
        body: dict[str, Any] = {
            "model": NAME, "prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, **sampling,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        body |= ({"logprobs": 0} if pieces else {}) | ({"return_progress": True} if progress else {})
        reply.sent = time.perf_counter()
        async with self._http.stream("POST", "/completions", json=body) as response:
            if response.status_code != 200:
                raise MegaKVError(f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:500]}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(reply, json.loads(line[6:]))
                    if leaves(reply):
                        reply.left = True
                        break
        return reply

    async def respond(self, text: str, new_tokens: int, previous: str | None = None) -> tuple[str, str]:
        """The id and the text of a response, which goes on from an earlier one."""
        body: dict[str, Any] = {"model": NAME, "input": text, "max_output_tokens": new_tokens, "temperature": 0}
        body |= {} if previous is None else {"previous_response_id": previous}
        answer = await self._http.post("/responses", json=body)
        if answer.status_code != 200:
            raise MegaKVError(f"{answer.status_code}: {answer.text[:500]}")
        found = answer.json()
        return found["id"], "".join(part["text"] for item in found["output"] for part in item["content"])


def _take(reply: Reply, event: dict[str, Any]) -> None:
    """Note what came."""
    now = time.perf_counter()
    if "error" in event:
        raise MegaKVError(f"the server's answer failed: {event['error']}")
    if progress := event.get("prompt_progress"):
        reply.progress.append((now, progress["processed"]))
    if usage := event.get("usage"):
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        # Several may come at once.
        reply.stamps += [now] * (usage["completion_tokens"] - len(reply.stamps))
    for choice in event.get("choices", ()):
        if choice.get("logprobs"):
            reply.pieces += choice["logprobs"]["tokens"]
