"""Errors as the error objects of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
TOO_LONG = "context_length_exceeded"
"""For a prompt that alone does not fit, and nothing else: clients shorten it then."""
MOST_SHOWN = 64
"""Letters of a value."""
ANTHROPIC_KINDS = {
    **KINDS,
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
ANTHROPIC_PATH = "/v1/messages"
MOST_LETTERS = 500
"""Of a message: what a stranger sent is not sent back at any length."""


@dataclass
class ApiError(Exception):
    """An answer that is an error."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The object that clients know."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message if len(self.message) <= MOST_LETTERS else f"{self.message[:MOST_LETTERS]} ..."
        # A lone surrogate has no UTF-8.
        message = message.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def json(self, *, anthropic: bool = False) -> bytes:
        """The object as it is sent, to clients of OpenAI's or of Anthropic's."""
        said = self.body()
        if anthropic:
            kind = ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            said = {"type": "error", "error": {"type": kind, "message": said["error"]["message"]}}
        return json.dumps(said).encode()


def speaks_anthropic(path: str) -> bool:
    """Whether Anthropic's clients ask there."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def broken() -> ApiError:
    """For what nobody has foreseen; what it was stands in the server's log."""
    return ApiError(500, "the server failed at this request", code="internal_error")


def unavailable(message: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """For what works again later, perhaps elsewhere."""
    return ApiError(503, message, code="unavailable", headers={"retry-after": "5", **(headers or {})})


def too_long(what: str, context: int) -> ApiError:
    """For a prompt beyond the model's positions."""
    message = f"{what} is longer than the model's context of {context} tokens"
    return ApiError(400, message, code=TOO_LONG)


@contextmanager
def prompts_in(field: str) -> Iterator[None]:
    """Errors of prompts within name the field in which the prompts stood."""
    try:
        yield
    except ApiError as error:
        if error.code not in (TOO_LONG, "chat_template", "no_chat_template", "empty_prompt"):
            raise
        raise replace(error, param=field) from error.__cause__


def shown(value: Any) -> str:
    """A value of a body as a message names it: what is long by its kind alone."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]!r}..."
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value, default=repr)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
