"""The application: every endpoint, and errors as clients know them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from megakv.serving.http.answers import Answers
from megakv.serving.http.call import ServedModel, make_call, read_generation_config
from megakv.serving.http.chat_schemas import ChatBody, ResponseBody
from megakv.serving.http.completions import ChatAnswer, CompletionAnswer
from megakv.serving.http.conversations import Conversations, Turn
from megakv.serving.http.either import EitherParts
from megakv.serving.http.errors import ApiError, broken, prompts_in
from megakv.serving.http.held import Held, held_to
from megakv.serving.http.metrics import Metrics, status
from megakv.serving.http.page import page
from megakv.serving.http.parts import Parts
from megakv.serving.http.prompt_reader import BodyLimits, BodyScanner
from megakv.serving.http.prompt_work import Prompts, PromptWork
from megakv.serving.http.ranks import Ranks
from megakv.serving.http.responses import ResponseAnswer, messages_of
from megakv.serving.http.schemas import Body, CompletionBody, SamplingBody
from megakv.serving.http.settings import HttpSettings
from megakv.serving.http.stream import EventStream, while_listened_to
from megakv.serving.http.tokens import DetokenizeBody, TokenizeBody, TokensBody, detokenized, tokenized
from megakv.version import __version__

logger = logging.getLogger(__name__)

USUAL_COMPLETION_TOKENS = 16
"""Of an answer by ``/v1/completions`` that says nothing of its length, as OpenAI has it."""
PROMPTS_IN: dict[type[Body], str] = {CompletionBody: "prompt", ResponseBody: "input", DetokenizeBody: "tokens"}
"""Fields of prompts; of other bodies they are messages."""
NONE: Mapping[str, str] = MappingProxyType({})
MERGED = MappingProxyType({"x-megakv-messages": "merged"})
"""Headers of an answer whose messages were merged for the model's template."""
B = TypeVar("B", bound=Body)


class Service:
    """The endpoints over the ranks of one model."""

    def __init__(self, ranks: Ranks, served: ServedModel, settings: HttpSettings, metrics: Metrics):
        self._ranks, self._served, self._settings, self._metrics = ranks, served, settings, metrics
        self._work = PromptWork(served.reader)
        self._conversations = Conversations()
        self._page = page()
        if served.tokenizer.chat_template is not None and served.reader.template.traits.drops_results:
            logger.warning("the model's chat template leaves out what tools came to: answers will not go by it")

    def app(self) -> FastAPI:
        """The application."""
        # No pages about the interface, which would load scripts from elsewhere.
        app = FastAPI(title="MegaKV", docs_url=None, redoc_url=None, openapi_url=None)
        routes: list[tuple[str, str, Callable[..., Coroutine[Any, Any, Response]]]] = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/responses", self.responses),
            ("GET", "/v1/responses/{name}", self.kept_response),
            ("DELETE", "/v1/responses/{name}", self.forget_response),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/ping", self.health),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.prometheus),
            ("GET", "/status", self.status),
            ("POST", "/load_model", self.load_model),
            ("GET", "/", self.page),
        ]
        for method, path, endpoint in routes:
            methods = ["GET", "HEAD"] if method == "GET" else [method]
            app.add_api_route(path, endpoint, methods=methods, response_model=None)
        for kind in (ApiError, 404, 405, Exception):
            app.add_exception_handler(kind, _said)
        return app

    # Endpoints

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body, prompts = await self._body(request, ChatBody)
        held = self._served.behind_thoughts(held_to(body, self._served.opening, body.response_format), prompts[0])
        answers = await self._asked(
            request,
            body,
            prompts,
            held,
            asked=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            n=body.n or 1,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            generation=read_generation_config(body.generation_config),
            continues=bool(body.continue_final_message),
        )
        parts = [self._parts(held, body, prompts[0]) for _ in range(answers.count)]
        writer = ChatAnswer(self._served, body, answers, parts)
        return await self._answered(request, body, answers, writer, MERGED if body.merged else NONE)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        body, prompts = await self._body(request, CompletionBody)
        answers = await self._asked(
            request,
            body,
            prompts,
            held_to(body, self._served.opening),
            asked=body.max_tokens,
            usual=USUAL_COMPLETION_TOKENS,
            n=body.n or 1,
            logprobs=body.logprobs,
            prompt_logprobs=body.scores,
            continues=True,
        )
        return await self._answered(request, body, answers, CompletionAnswer(self._served, body, answers))

    async def responses(self, request: Request) -> Response:
        """``/v1/responses``."""
        body, _ = await self._body(request, ResponseBody)
        held = held_to(body, self._served.opening, body.text.format if body.text else None)
        owner, previous = _owner(request), None
        if body.previous_response_id is not None:
            previous = self._turn(body.previous_response_id, owner)
        added = messages_of(body)
        before = [] if previous is None else previous.messages
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        encoding = self._work.encode_chat(_sender(request), [*system, *before, *added], _tools(body), {})
        with prompts_in("input"):
            prompt = await while_listened_to(request.receive, encoding)
        held = self._served.behind_thoughts(held, prompt)
        answers = await self._asked(request, body, [prompt], held, asked=body.max_output_tokens)
        name = f"resp_{uuid.uuid4().hex}"

        def keep(response: Any, message: dict[str, Any]) -> None:
            if body.store is not False:
                turn = Turn(owner, previous, (*added, message), response.model_dump(mode="json", by_alias=True))
                self._conversations.keep(name, turn)

        writer = ResponseAnswer(name, body, self._parts(held, body, prompt), answers, keep)
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
        self._ranks.check_serves()
        return _json({"status": "ok"})

    async def version(self) -> Response:
        """Which version of the package serves."""
        return _json({"version": __version__})

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``."""
        body, _ = await self._body(request, TokenizeBody)
        making = tokenized(body, _sender(request), self._work, self._served)
        return _json(await while_listened_to(request.receive, making))

    async def detokenize(self, request: Request) -> Response:
        """``/detokenize``."""
        body, _ = await self._body(request, DetokenizeBody)
        making = detokenized(body, _sender(request), self._work, self._served)
        return _json(await while_listened_to(request.receive, making))

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
        with prompts_in(PROMPTS_IN.get(kind, "messages")):
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
        self._metrics.passed_over(body.passed)
        if isinstance(body, SamplingBody | TokensBody):
            if self._settings.strict_model and body.model is not None:
                self._check_model(body.model)
            # Whatever it was called, it is the one that answers.
            body.model = self._served.name
        return body, prompts

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"there is no model {name!r} here, but {self._served.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _limits(self, kind: type[Body]) -> BodyLimits:
        reader, numbers = self._served.reader, kind in (CompletionBody, DetokenizeBody)
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
        with prompts_in(PROMPTS_IN.get(type(body), "messages")):
            call = make_call(body, prompts, self._served, self._settings, key=key, user=user, form=form, **how)
        looks = call.stops or how.get("logprobs") is not None
        if (held is not None and not held.thinks) or not looks or not isinstance(body, ChatBody | ResponseBody):
            return Answers(self._ranks, self._served, call, self._metrics.timed)
        contents = partial(self._served.contents, prompts[0], _tools(body))
        return Answers(self._ranks, self._served, call, self._metrics.timed, contents)

    def _parts(self, held: Held | None, body: ChatBody | ResponseBody, prompt: tuple[int, ...]) -> Parts:
        if held is not None and not held.opening:
            return held.parts()
        parts = self._served.parts(prompt, _tools(body))
        # Behind thoughts these tell JSON and calls apart, too.
        return parts if held is None or held.thinks else EitherParts(held.opening, parts)

    async def _answered(
        self, request: Request, body: SamplingBody, answers: Answers, writer: Any, headers: Mapping[str, str] = NONE
    ) -> Response:
        if body.stream:
            return EventStream(answers, writer.events(), writer.failed, headers)
        answer = await while_listened_to(request.receive, writer.whole())
        content = answer.model_dump_json(by_alias=True, exclude_unset=True)
        return Response(content, media_type="application/json", headers=dict(headers))

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
    return Response(said.json(), said.status, media_type="application/json", headers=dict(said.headers))


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
