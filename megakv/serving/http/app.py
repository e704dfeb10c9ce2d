"""The application: every endpoint, and errors as clients know them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Coroutine
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response

from megakv.serving.http.anthropic import MessageAnswer
from megakv.serving.http.anthropic_schemas import MessagesBody
from megakv.serving.http.call import ServedModel, read_generation_config
from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.completions import ChatAnswer, CompletionAnswer
from megakv.serving.http.conversations import Conversations, Turn
from megakv.serving.http.errors import ANTHROPIC_PATH, ApiError, broken, prompts_in, speaks_anthropic
from megakv.serving.http.held import held_to
from megakv.serving.http.metrics import Metrics, status
from megakv.serving.http.page import page
from megakv.serving.http.ranks import Ranks
from megakv.serving.http.response_items import input_items, messages_of, prompt_of
from megakv.serving.http.response_schemas import ResponseBody
from megakv.serving.http.responses import ResponseAnswer
from megakv.serving.http.schemas import CompletionBody
from megakv.serving.http.settings import HttpSettings
from megakv.serving.http.steps import NONE, Steps, as_json, owner_of, sender_of, tools_of
from megakv.serving.http.stream import while_listened_to
from megakv.serving.http.tokens import DetokenizeBody, TokenizeBody, detokenized, tokenized
from megakv.version import __version__

logger = logging.getLogger(__name__)

USUAL_COMPLETION_TOKENS = 16
"""Of an answer by ``/v1/completions`` that says nothing of its length, as OpenAI has it."""
MERGED = MappingProxyType({"x-megakv-messages": "merged"})
"""Headers of an answer whose messages were merged for the model's template."""


class Service(Steps):
    """The endpoints over the ranks of one model."""

    def __init__(self, ranks: Ranks, served: ServedModel, settings: HttpSettings, metrics: Metrics):
        super().__init__(ranks, served, settings, metrics)
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
            ("POST", ANTHROPIC_PATH, self.messages),
            ("POST", f"{ANTHROPIC_PATH}/count_tokens", self.count_tokens),
            ("POST", "/v1/responses", self.responses),
            ("GET", "/v1/responses/{name}", self.kept_response),
            ("DELETE", "/v1/responses/{name}", self.forget_response),
            ("GET", "/v1/responses/{name}/input_items", self.input_items),
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
        body, prompts = await self.body(request, ChatBody)
        held = self.served.behind_thoughts(held_to(body, self.served.opening, body.response_format), prompts[0])
        answers = await self.asked(
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
        parts = [self.parts(held, body, prompts[0]) for _ in range(answers.count)]
        writer = ChatAnswer(self.served, body, answers, parts)
        return await self.answered(request, body, answers, writer, MERGED if body.merged else NONE)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        body, prompts = await self.body(request, CompletionBody)
        answers = await self.asked(
            request,
            body,
            prompts,
            held_to(body, self.served.opening),
            asked=body.max_tokens,
            usual=USUAL_COMPLETION_TOKENS,
            n=body.n or 1,
            logprobs=body.logprobs,
            prompt_logprobs=body.scores,
            continues=True,
        )
        return await self.answered(request, body, answers, CompletionAnswer(self.served, body, answers))

    async def messages(self, request: Request) -> Response:
        """``/v1/messages``, which are chats in other words."""
        body, prompts = await self.body(request, MessagesBody)
        held = self.served.behind_thoughts(held_to(body, self.served.opening, body.response_format), prompts[0])
        answers = await self.asked(request, body, prompts, held, asked=body.max_tokens)
        writer = MessageAnswer(body, answers, self.parts(held, body, prompts[0]))
        return await self.answered(request, body, answers, writer, MERGED if body.merged else NONE)

    async def count_tokens(self, request: Request) -> Response:
        """``/v1/messages/count_tokens``."""
        body, prompts = await self.body(request, MessagesBody)
        return as_json({"input_tokens": len(prompts[0]), "omitted_tools": body.omitted_tools})

    async def responses(self, request: Request) -> Response:
        """``/v1/responses``."""
        body, _ = await self.body(request, ResponseBody)
        held = held_to(body, self.served.opening, body.text.format if body.text else None)
        owner, previous = owner_of(request), None
        if body.previous_response_id is not None:
            previous = self._turn(body.previous_response_id, owner)
        added = messages_of(body)
        before = [] if previous is None else previous.messages
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []

        async def encode(messages: list[dict[str, Any]]) -> tuple[int, ...]:
            return await self.work.encode_chat(sender_of(request), messages, tools_of(body), body.template_options)

        with prompts_in("input"):
            making = prompt_of(body, [*system, *before, *added], encode, self.served.context)
            prompt = await while_listened_to(request.receive, making)
        held = self.served.behind_thoughts(held, prompt)
        asked, logprobs = body.max_output_tokens, body.logprobs
        answers = await self.asked(request, body, [prompt], held, asked=asked, logprobs=logprobs)
        name = f"resp_{uuid.uuid4().hex}"

        def keep(response: Any, message: dict[str, Any]) -> None:
            if body.store is not False:
                turn = Turn(owner, previous, (*added, message), response.model_dump(mode="json", by_alias=True))
                self._conversations.keep(name, turn)

        writer = ResponseAnswer(name, self.served, body, self.parts(held, body, prompt), answers, keep)
        return await self.answered(request, body, answers, writer)

    async def kept_response(self, request: Request, name: str) -> Response:
        """A response that was kept."""
        return as_json(self._turn(name, owner_of(request)).response)

    async def input_items(self, request: Request, name: str) -> Response:
        """What a response was made from."""
        return as_json(input_items(name, self._turn(name, owner_of(request)), request.query_params))

    async def forget_response(self, request: Request, name: str) -> Response:
        """Forget a response; those that go on from it stay."""
        self._turn(name, owner_of(request))
        self._conversations.drop(name, owner_of(request))
        return as_json({"id": name, "object": "response", "deleted": True})

    async def models(self) -> Response:
        """The one model."""
        return as_json({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """The one model, by its name."""
        self.check_model(name)
        return as_json(self._card())

    async def health(self) -> Response:
        """Whether requests are taken."""
        self.ranks.check_serves()
        return as_json({"status": "ok"})

    async def version(self) -> Response:
        """Which version of the package serves."""
        return as_json({"version": __version__})

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``."""
        body, _ = await self.body(request, TokenizeBody)
        making = tokenized(body, sender_of(request), self.work, self.served)
        return as_json(await while_listened_to(request.receive, making))

    async def detokenize(self, request: Request) -> Response:
        """``/detokenize``."""
        body, _ = await self.body(request, DetokenizeBody)
        making = detokenized(body, sender_of(request), self.work, self.served)
        return as_json(await while_listened_to(request.receive, making))

    async def prometheus(self) -> Response:
        """Metrics."""
        stats, _ = await self.ranks.stats(documents=False)
        return Response(self.metrics.text(stats), media_type="text/plain; version=0.0.4")

    async def status(self) -> Response:
        """What the page shows."""
        return as_json(status(*await self.ranks.stats(), self.served))

    async def load_model(self) -> Response:
        """What transformers' client asks for before it begins; nothing is loaded, for the model is there."""
        return Response('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")

    async def page(self) -> Response:
        """The page."""
        return self._page

    def _turn(self, name: str, owner: str) -> Turn:
        turn = self._conversations.find(name, owner)
        if turn is None:
            message = f"there is no response {name!r}: it was never made, not stored, or has made room for later ones"
            raise ApiError(404, message, code="response_not_found", param="previous_response_id")
        return turn

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": 0,
            "owned_by": "megakv",
            "max_model_len": self.served.context,
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
