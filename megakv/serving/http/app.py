"""The application: every endpoint, and errors as clients know them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from megakv.serving.form import Form
from megakv.serving.http.answers import Answers, check_serves
from megakv.serving.http.body_limits import BodyLimits, BodyScanner
from megakv.serving.http.call import Call, make_call, read_generation_config
from megakv.serving.http.channel import Bell
from megakv.serving.http.chat import ChatAnswer
from megakv.serving.http.completions import CompletionAnswer
from megakv.serving.http.conversations import Conversations, Turn
from megakv.serving.http.errors import ApiError
from megakv.serving.http.handlers import HANDLERS
from megakv.serving.http.held import Held, held_to
from megakv.serving.http.metrics import Metrics
from megakv.serving.http.page import Page
from megakv.serving.http.parts import Parts, free_parts
from megakv.serving.http.prompt_work import Prompts, PromptWork
from megakv.serving.http.response_schemas import ResponseBody
from megakv.serving.http.responses import ResponseAnswer, messages_of
from megakv.serving.http.schemas import Body, ChatBody, CompletionBody, SamplingBody
from megakv.serving.http.served_model import ServedModel
from megakv.serving.http.settings import HttpSettings
from megakv.serving.http.status import status
from megakv.serving.http.stream import EventStream, while_listened_to
from megakv.serving.loop import ServingLoop

USUAL_COMPLETION_TOKENS = 16
"""Of an answer by ``/v1/completions`` that says nothing of its length, as OpenAI has it."""
B = TypeVar("B", bound=Body)


class Service:
    """The endpoints over one loop."""

    def __init__(self, loop: ServingLoop, served: ServedModel, settings: HttpSettings, metrics: Metrics):
        self._loop, self._served, self._settings, self._metrics = loop, served, settings, metrics
        self.work = PromptWork(served.reader)
        self._conversations = Conversations()
        # It is the event loop's, which is there with the first call.
        self._bell: Bell | None = None
        self._page = Page()

    def app(self) -> FastAPI:
        """The application."""
        # No pages about the interface, which would load scripts from elsewhere.
        app = FastAPI(title="MegaKV", docs_url=None, redoc_url=None, openapi_url=None)
        routes: dict[str, tuple[str, Callable[..., Coroutine[Any, Any, Response]]]] = {
            "/v1/chat/completions": ("POST", self.chat),
            "/v1/completions": ("POST", self.completions),
            "/v1/responses": ("POST", self.responses),
            "/v1/responses/{name}": ("GET", self.kept_response),
            "/v1/models": ("GET", self.models),
            "/v1/models/{name:path}": ("GET", self.model),
            "/health": ("GET", self.health),
            "/metrics": ("GET", self.prometheus),
            "/status": ("GET", self.status),
            "/load_model": ("POST", self.load_model),
            "/": ("GET", self.page),
        }
        for path, (method, endpoint) in routes.items():
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
        app.add_api_route("/v1/responses/{name}", self.forget_response, methods=["DELETE"], response_model=None)
        for kind, handler in HANDLERS.items():
            app.add_exception_handler(kind, handler)
        return app

    # Endpoints

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body, prompts = await self._body(request, ChatBody)
        held = held_to(body, body.response_format)
        prompts = await self._prompts(request, body, prompts)
        call = make_call(
            body,
            prompts,
            self._served,
            self._settings,
            key=_owner(request),
            user=_user(request, body),
            asked=body.max_completion_tokens or body.max_tokens,
            usual=None,
            n=body.n or 1,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            generation=read_generation_config(body.generation_config),
            special=self._served.answer_template is not None,
            form=await self._form(request, held),
        )
        answers = self._answers(call)
        tools = [function.template_values() for function in body.functions]
        parts = [self._parts(held, call.prompts[0], tools) for _ in range(answers.count)]
        writer = ChatAnswer(self._served, body, answers, parts)
        return await self._answered(request, body, answers, writer)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        body, prompts = await self._body(request, CompletionBody)
        call = make_call(
            body,
            await self._prompts(request, body, prompts),
            self._served,
            self._settings,
            key=_owner(request),
            user=_user(request, body),
            asked=body.max_tokens,
            usual=USUAL_COMPLETION_TOKENS,
            n=body.n or 1,
            logprobs=body.logprobs,
            continues=True,
        )
        answers = self._answers(call)
        return await self._answered(request, body, answers, CompletionAnswer(self._served, body, answers))

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
        tools = [function.template_values() for function in body.functions]
        encoding = self.work.encode_chat(_sender(request), [*system, *before, *added], tools, {})
        prompt = await while_listened_to(request.receive, encoding)
        call = make_call(
            body,
            [prompt],
            self._served,
            self._settings,
            key=_owner(request),
            user=_user(request, body),
            asked=body.max_output_tokens,
            usual=None,
            special=self._served.answer_template is not None,
            form=await self._form(request, held),
        )
        name = f"resp_{uuid.uuid4().hex}"

        def keep(response: Any, message: dict[str, Any]) -> None:
            if body.store is not False:
                turn = Turn(owner, previous, (*added, message), response.model_dump(mode="json", by_alias=True))
                self._conversations.keep(name, turn)

        answers = self._answers(call)
        writer = ResponseAnswer(name, body, self._parts(held, call.prompts[0], tools), answers, keep)
        return await self._answered(request, body, answers, writer)

    async def kept_response(self, request: Request, name: str) -> Response:
        """A response that was kept."""
        return _json(self._turn(name, _owner(request)).response)

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
        check_serves(self._loop)
        return _json({"status": "ok"})

    async def prometheus(self) -> Response:
        """Metrics."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def status(self) -> Response:
        """What the page shows."""
        return _json(status(self._loop, self._served))

    async def load_model(self) -> Response:
        """What transformers' client asks for before it begins; nothing is loaded, for the model is there."""
        return Response('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")

    async def page(self) -> Response:
        """The page."""
        return self._page.response()

    # Steps of a call

    async def _body(self, request: Request, kind: type[B]) -> tuple[B, Prompts | None]:
        check_serves(self._loop)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            # What a page of another site may send without asking is no JSON.
            raise ApiError(415, "send JSON, with the header 'content-type: application/json'", code="wrong_media_type")
        scanner, parts, more = BodyScanner(self._limits(kind)), [], True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client has left")
            parts.append(message.get("body", b""))
            scanner.add(parts[-1])
            more = message.get("more_body", False)
        reading = self.work.read(_sender(request), kind, parts)
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

    async def _prompts(self, request: Request, body: ChatBody | CompletionBody, made: Prompts | None) -> Prompts:
        """The prompts, made now where they were not with the body."""
        if made is not None:
            return made
        return await while_listened_to(request.receive, self.work.prompts(_sender(request), body))

    async def _form(self, request: Request, held: Held | None) -> Form | None:
        if held is None:
            return None
        return await self.work.in_thread(_sender(request), self._served.form, held.form, held.field)

    def _parts(self, held: Held | None, prompt: tuple[int, ...], tools: list[dict[str, Any]]) -> Parts:
        return free_parts(self._served, prompt, tools) if held is None else held.parts()

    def _answers(self, call: Call) -> Answers:
        self._bell = self._bell or Bell()
        return Answers(self._loop, self._served, call, self._metrics.timed, self._bell)

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
