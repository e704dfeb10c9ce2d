"""Texts as tokens, and tokens as text: ``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megakv.serving.http.call import ServedModel
from megakv.serving.http.errors import ApiError, prompts_in
from megakv.serving.http.message_schemas import Message, Tool
from megakv.serving.http.prompt_work import PromptWork
from megakv.serving.http.schemas import MOST_FIELDS, MOST_MESSAGES, MOST_TOOLS, Body, Name, Text, Tokens, at_most


class TokensBody(Body):
    """What both endpoints take."""

    model: Name | None = None


class TokenizeBody(TokensBody):
    """A text, or a conversation, that is to be tokens."""

    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[dict[Name, bool | int | float | str | None], at_most(MOST_FIELDS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: a chat template writes them itself; leave it out beside messages")
        return self


class DetokenizeBody(TokensBody):
    """Tokens that are to be text."""

    tokens: Tokens


async def tokenized(body: TokenizeBody, sender: str, work: PromptWork, served: ServedModel) -> dict[str, Any]:
    """The tokens of a text or a conversation."""
    if body.messages is None:
        with prompts_in("prompt"):
            tokens = await work.encode(sender, body.prompt or "", special=body.add_special_tokens is not False)
    else:
        messages = [message.template_values() for message in body.messages]
        tools = [tool.function.template_values() for tool in body.tools or []]
        with prompts_in("messages"):
            tokens = await work.encode_chat(sender, messages, tools, body.chat_template_kwargs or {})
    names = served.tokenizer.convert_ids_to_tokens(list(tokens)) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": served.context, "tokens": list(tokens), "token_strs": names}


async def detokenized(body: DetokenizeBody, sender: str, work: PromptWork, served: ServedModel) -> dict[str, Any]:
    """The text of tokens."""
    for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token < served.vocabulary:
            message = f"tokens: {token} is no token; allowed: 0 to {served.vocabulary - 1}"
            raise ApiError(400, message, code="invalid_value", param="tokens")
    return {"prompt": await work.in_thread(sender, served.tokenizer.decode, list(body.tokens))}
