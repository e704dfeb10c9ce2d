"""Steps that all endpoints take from a request's body to its answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic_core import to_json

from megakv.serving.http.answers import Answers
from megakv.serving.http.call import ServedModel, make_call
from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.either import EitherParts
from megakv.serving.http.errors import ApiError, prompts_in
from megakv.serving.http.held import Held
from megakv.serving.http.metrics import Metrics
from megakv.serving.http.parts import Parts
from megakv.serving.http.prompt_reader import BodyLimits, BodyScanner
from megakv.serving.http.prompt_work import Prompts, PromptWork
from megakv.serving.http.ranks import Ranks
from megakv.serving.http.response_schemas import ResponseBody
from megakv.serving.http.schemas import Body, CompletionBody, SamplingBody
from megakv.serving.http.settings import HttpSettings
from megakv.serving.http.stream import EventStream, while_listened_to
from megakv.serving.http.tokens import DetokenizeBody, TokensBody

PROMPTS_IN: dict[type[Body], str] = {CompletionBody: "prompt", ResponseBody: "input", DetokenizeBody: "tokens"}
"""Fields of prompts; of other bodies they are messages."""
NONE: Mapping[str, str] = MappingProxyType({})
B = TypeVar("B", bound=Body)


class Steps:
    """Reads bodies, asks the ranks, and writes answers."""

    def __init__(self, ranks: Ranks, served: ServedModel, settings: HttpSettings, metrics: Metrics):
        self.ranks, self.served, self.settings, self.metrics = ranks, served, settings, metrics
        self.work = PromptWork(served.reader)

    async def body(self, request: Request, kind: type[B]) -> tuple[B, Prompts]:
        """A request's body, and the tokens of its prompts."""
        self.ranks.check_serves()
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            # What a page of another site may send without asking is no JSON.
            raise ApiError(415, "send JSON, with the header 'content-type: application/json'", code="wrong_media_type")
        scanner, content, more = BodyScanner(self._limits(kind)), bytearray(), True
        with prompts_in(PROMPTS_IN.get(kind, "messages")):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(499, "the client has left")
                part = message.get("body", b"")
                scanner.add(part)
                content += part
                more = message.get("more_body", False)
            reading = self.work.read(sender_of(request), kind, content)
            body, prompts = await while_listened_to(request.receive, reading)
        self.metrics.passed_over(body.passed)
        if isinstance(body, SamplingBody | TokensBody):
            if self.settings.strict_model and body.model is not None:
                self.check_model(body.model)
            # Whatever it was called, it is the one that answers.
            body.model = self.served.name
        return body, prompts

    def check_model(self, name: str) -> None:
        """Refuse a model that is not here."""
        if name != self.served.name:
            message = f"there is no model {name!r} here, but {self.served.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _limits(self, kind: type[Body]) -> BodyLimits:
        reader, numbers = self.served.reader, kind in (CompletionBody, DetokenizeBody)
        prompts = self.settings.max_choices if numbers else 1
        return BodyLimits.of(reader.context, reader.longest_token, prompts, numbers=numbers)

    async def asked(
        self, request: Request, body: SamplingBody, prompts: Prompts, held: Held | None = None, **how: Any
    ) -> Answers:
        """The answers to a call, as `make_call` makes it."""
        form = None
        if held is not None:
            form = await self.work.in_thread(sender_of(request), self.served.form, held.form, held.field)
        key, user = owner_of(request), user_of(request, body)
        with prompts_in(PROMPTS_IN.get(type(body), "messages")):
            call = make_call(body, prompts, self.served, self.settings, key=key, user=user, form=form, **how)
        looks = call.stops or how.get("logprobs") is not None
        if (held is not None and not held.thinks) or not looks or not isinstance(body, ChatBody | ResponseBody):
            return Answers(self.ranks, self.served, call, self.metrics.timed)
        contents = partial(self.served.contents, prompts[0], tools_of(body))
        return Answers(self.ranks, self.served, call, self.metrics.timed, contents)

    def parts(self, held: Held | None, body: ChatBody | ResponseBody, prompt: tuple[int, ...]) -> Parts:
        """Cuts an answer to a prompt."""
        if held is not None and not held.opening:
            return held.parts()
        parts = self.served.parts(prompt, tools_of(body))
        # Behind thoughts these tell JSON and calls apart, too.
        return parts if held is None or held.thinks else EitherParts(held.opening, parts)

    async def answered(
        self, request: Request, body: SamplingBody, answers: Answers, writer: Any, headers: Mapping[str, str] = NONE
    ) -> Response:
        """What a writer makes of answers, in a stream or whole."""
        if body.stream:
            return EventStream(answers, writer.events(), writer.failed, headers)
        answer = await while_listened_to(request.receive, writer.whole())
        content = answer.model_dump_json(by_alias=True, exclude_unset=True)
        return Response(content, media_type="application/json", headers=dict(headers))


def tools_of(body: ChatBody | ResponseBody) -> list[dict[str, Any]]:
    """A body's tools as chat templates take them."""
    return [function.template_values() for function in body.functions]


def owner_of(request: Request) -> str:
    """The key of a request, by its number: keys take turns, and have responses of their own."""
    return str(request.scope.get("key"))


def sender_of(request: Request) -> str:
    """Between whom turns are taken before a body is read: keys, and without keys hosts."""
    key = request.scope.get("key")
    return f"key {key}" if key is not None else request.client.host if request.client else ""


def user_of(request: Request, body: SamplingBody) -> str:
    """The user of a key, between whom turns are taken: the one whom a request names, or its host."""
    if body.user is not None:
        return f"user {body.user}"
    return f"host {request.client.host if request.client else None}"


def as_json(value: Any) -> Response:
    """A value as a response."""
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")
