"""The application: every endpoint, and errors as clients know them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from megakv.serving.http.answers import Answers
from megakv.serving.http.anthropic import MessageAnswer
from megakv.serving.http.anthropic_schemas import MessagesBody
from megakv.serving.http.call import Held, ServedModel, held_to, make_call, read_generation_config
from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.completions import ChatAnswer, CompletionAnswer
from megakv.serving.http.conversations import Conversations, Turn
from megakv.serving.http.errors import ANTHROPIC_PATH, ApiError, broken, speaks_anthropic
from megakv.serving.http.metrics import Metrics, status
from megakv.serving.http.page import page
from megakv.serving.http.parts import Parts
from megakv.serving.http.prompt_reader import BodyLimits, BodyScanner
from megakv.serving.http.prompt_work import Prompts, PromptWork
from megakv.serving.http.ranks import Ranks
from megakv.serving.http.response_items import input_items, messages_of, prompt_of
from megakv.serving.http.response_schemas import ResponseBody
from megakv.serving.http.responses import ResponseAnswer
from megakv.serving.http.schemas import Body, CompletionBody, SamplingBody
from megakv.serving.http.settings import HttpSettings
from megakv.serving.http.stream import EventStream, while_listened_to

USUAL_COMPLETION_TOKENS = 16
"""Of an answer by ``/v1/completions`` that says nothing of its length, as OpenAI has it."""
B = TypeVar("B", bound=Body)


class Service:
    """The endpoints over the ranks of one model."""

    def __init__(self, ranks: Ranks, served: ServedModel, settings: HttpSettings, metrics: Metrics):
        self._ranks, self._served, self._settings, self._metrics = ranks, served, settings, metrics
        self._work = PromptWork(served.reader)
        self._conversations = Conversations()
        self._page = page()

    def app(self) -> FastAPI:
        """The application."""
        # No pages about the interface, which would load scripts from elsewhere.
        app = FastAPI(title="MegaKV", docs_url=None, redoc_url=None, openapi_url=None)
        routes: list[tuple[str, str, Callable[..., Coroutine[Any, Any, Response]]]] = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", ANTHROPIC_PATH, self.messages),
            ("POST", f"{ANTHROPIC_PATH}/count_tokens", self.count_tokens),
            ("POST", "/v1/responses", self.responses),
            ("GET", "/v1/responses/{name}", self.kept_response),
            ("DELETE", "/v1/responses/{name}", self.forget_response),
            ("GET", "/v1/responses/{name}/input_items", self.input_items),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.prometheus),
            ("GET", "/status", self.status),
            ("POST", "/load_model", self.load_model),
            ("GET", "/", self.page),
        ]
        for method, path, endpoint in routes:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
        for kind in (ApiError, 404, 405, Exception):
            app.add_exception_handler(kind, _said)
        return app

    # Endpoints

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body, prompts = await self._body(request, ChatBody)
        held = held_to(body, body.response_format)
        answers = await self._asked(
            request,
            body,
            prompts,
            held,
            asked=body.max_completion_tokens or body.max_tokens,
            n=body.n or 1,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            generation=read_generation_config(body.generation_config),
        )
        parts = [self._parts(held, body, prompts[0]) for _ in range(answers.count)]
        return await self._answered(request, body, answers, ChatAnswer(self._served, body, answers, parts))

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        body, prompts = await self._body(request, CompletionBody)
        answers = await self._asked(
            request,
            body,
            prompts,
            asked=body.max_tokens,
            usual=USUAL_COMPLETION_TOKENS,
            n=body.n or 1,
            logprobs=body.logprobs,
            continues=True,
        )
        return await self._answered(request, body, answers, CompletionAnswer(self._served, body, answers))

    async def messages(self, request: Request) -> Response:
        """``/v1/messages``, which are chats in other words."""
        body, prompts = await self._body(request, MessagesBody)
        held = held_to(body, body.response_format)
        asked = self._room(prompts[0], body.max_tokens)
        answers = await self._asked(request, body, prompts, held, asked=asked)
        writer = MessageAnswer(body, answers, self._parts(held, body, prompts[0]))
        return await self._answered(request, body, answers, writer)

    async def count_tokens(self, request: Request) -> Response:
        """``/v1/messages/count_tokens``."""
        body, prompts = await self._body(request, MessagesBody)
        return _json({"input_tokens": len(prompts[0]), "omitted_tools": body.omitted_tools})

    async def responses(self, request: Request) -> Response:
        """``/v1/responses``."""
        body, _ = await self._body(request, ResponseBody)
        held = held_to(body, body.text.format if body.text else None)
        owner, previous = _owner(request), None
        if body.previous_response_id is not None:
            previous = self._turn(body.previous_response_id, owner)
        added = messages_of(body)
        before = [] if previous is None else previous.messages
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []

        async def encode(messages: list[dict[str, Any]]) -> tuple[int, ...]:
            return await self._work.encode_chat(_sender(request), messages, _tools(body), body.template_options)

        making = prompt_of(body, [*system, *before, *added], encode, self._served.context)
        prompt = await while_listened_to(request.receive, making)
        asked, logprobs = body.max_output_tokens, body.logprobs
        answers = await self._asked(request, body, [prompt], held, asked=asked, logprobs=logprobs)
        name = f"resp_{uuid.uuid4().hex}"

        def keep(response: Any, message: dict[str, Any]) -> None:
            if body.store is not False:
                turn = Turn(owner, previous, (*added, message), response.model_dump(mode="json", by_alias=True))
                self._conversations.keep(name, turn)

        writer = ResponseAnswer(name, self._served, body, self._parts(held, body, prompt), answers, keep)
        return await self._answered(request, body, answers, writer)

    async def kept_response(self, request: Request, name: str) -> Response:
        """A response that was kept."""
        return _json(self._turn(name, _owner(request)).response)

    async def input_items(self, request: Request, name: str) -> Response:
        """What a response was made from."""
        return _json(input_items(name, self._turn(name, _owner(request)), request.query_params))

    async def forget_response(self, request: Request, name: str) -> Response:
        """Forget a response; those that go on from it stay."""
        self._turn(name, _owner(request))
        self._conversations.drop(name, _owner(request))
        return _json({"id": name, "object": "response", "deleted": True})

    async def models(self) -> Response:
        """The one model."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """The one model, by its name."""
        self._check_model(name)
        return _json(self._card())

    async def health(self) -> Response:
        """Whether requests are taken."""
        self._ranks.check_serves()
        return _json({"status": "ok"})

    async def prometheus(self) -> Response:
        """Metrics."""
        stats, _ = await self._ranks.stats(documents=False)
        return Response(self._metrics.text(stats), media_type="text/plain; version=0.0.4")

    async def status(self) -> Response:
        """What the page shows."""
        return _json(status(*await self._ranks.stats(), self._served))

    async def load_model(self) -> Response:
        """What transformers' client asks for before it begins; nothing is loaded, for the model is there."""
        return Response('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")

    async def page(self) -> Response:
        """The page."""
        return self._page

    # Steps of a call

    async def _body(self, request: Request, kind: type[B]) -> tuple[B, Prompts]:
        self._ranks.check_serves()
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            # What a page of another site may send without asking is no JSON.
            raise ApiError(415, "send JSON, with the header 'content-type: application/json'", code="wrong_media_type")
        scanner, content, more = BodyScanner(self._limits(kind)), bytearray(), True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client has left")
            part = message.get("body", b"")
            scanner.add(part)
            content += part
            more = message.get("more_body", False)
        reading = self._work.read(_sender(request), kind, content)
        body, prompts = await while_listened_to(request.receive, reading)
        if isinstance(body, SamplingBody):
            self._check_model(body.model)
        return body, prompts

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"there is no model {name!r} here, but {self._served.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _limits(self, kind: type[Body]) -> BodyLimits:
        reader, numbers = self._served.reader, kind is CompletionBody
        prompts = self._settings.max_choices if numbers else 1
        return BodyLimits.of(reader.context, reader.longest_token, prompts, numbers=numbers)

    async def _asked(
        self, request: Request, body: SamplingBody, prompts: Prompts, held: Held | None = None, **how: Any
    ) -> Answers:
        """The answers to a call, as `make_call` makes it."""
        form = None
        if held is not None:
            form = await self._work.in_thread(_sender(request), self._served.form, held.form, held.field)
        key, user = _owner(request), _user(request, body)
        call = make_call(body, prompts, self._served, self._settings, key=key, user=user, form=form, **how)
        return Answers(self._ranks, self._served, call, self._metrics.timed)

    def _room(self, prompt: tuple[int, ...], asked: int | None) -> int | None:
        """As much of an answer as there is room for: such clients ask for what their maker's models can have."""
        most, context = self._settings.max_new_tokens, self._served.context
        if context is not None:
            most = min(most, context - len(prompt))
        return None if asked is None else max(min(asked, most), 1)

    def _parts(self, held: Held | None, body: ChatBody | ResponseBody, prompt: tuple[int, ...]) -> Parts:
        return self._served.parts(prompt, _tools(body)) if held is None else held.parts()

    async def _answered(self, request: Request, body: SamplingBody, answers: Answers, writer: Any) -> Response:
        if body.stream:
            return EventStream(answers, writer.events(), writer.failed)
        answer = await while_listened_to(request.receive, writer.whole())
        return Response(answer.model_dump_json(by_alias=True, exclude_unset=True), media_type="application/json")

    def _turn(self, name: str, owner: str) -> Turn:
        turn = self._conversations.find(name, owner)
        if turn is None:
            message = f"there is no response {name!r}: it was never made, not stored, or has made room for later ones"
            raise ApiError(404, message, code="response_not_found", param="previous_response_id")
        return turn

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": 0,
            "owned_by": "megakv",
            "max_model_len": self._served.context,
        }


async def _said(request: Request, error: Exception) -> Response:
    """An error of an endpoint, or that there is none, as its object."""
    status, path = getattr(error, "status_code", None), request.url.path
    said = error if isinstance(error, ApiError) else broken()
    if status == 404:
        said = ApiError(404, f"there is nothing at {path}", code="unknown_url")
    elif status == 405:
        allowed = {"allow": getattr(error, "headers", {}).get("Allow", "")}
        said = ApiError(405, f"{request.method} is not allowed at {path}", code="method_not_allowed", headers=allowed)
    content = said.json(anthropic=speaks_anthropic(path))
    return Response(content, said.status, media_type="application/json", headers=dict(said.headers))


def _tools(body: ChatBody | ResponseBody) -> list[dict[str, Any]]:
    return [function.template_values() for function in body.functions]


def _owner(request: Request) -> str:
    """The key of a request, by its number: keys take turns, and have responses of their own."""
    return str(request.scope.get("key"))


def _sender(request: Request) -> str:
    """Between whom turns are taken before a body is read: keys, and without keys hosts."""
    key = request.scope.get("key")
    return f"key {key}" if key is not None else request.client.host if request.client else ""


def _user(request: Request, body: SamplingBody) -> str:
    """The user of a key, between whom turns are taken: the one whom a request names, or its host."""
    if body.user is not None:
        return f"user {body.user}"
    return f"host {request.client.host if request.client else None}"


def _json(value: Any) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")
