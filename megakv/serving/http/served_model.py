"""What requests need to know of the model that answers them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template

from megakv.costmodel.config_sizes import positions
from megakv.serving.form import Form
from megakv.serving.http.errors import ApiError
from megakv.serving.request import Sampling

WORKERS = 2
"""Threads that make tokens of prompts: the one that speaks with clients must not stand still for a long text."""
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ServedModel:
    """Name, tokenizer and limits of a model; `defaults` hold where a request says nothing."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    context: int | None
    vocabulary: int
    end_ids: frozenset[int]
    defaults: Sampling
    answer_template: Any = None
    """How answers are cut into text, reasoning and calls of tools, as transformers has it; None where nobody knows."""
    _workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(WORKERS, "megakv-tokens"))

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> ServedModel:
        """Of a model as it was loaded."""
        config, generation = model.config.get_text_config(), model.generation_config
        ends = generation.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if tokenizer.eos_token_id is not None:
            ends = [*ends, tokenizer.eos_token_id]
        given = {key: value for key in DEFAULTS if (value := getattr(generation, key, None)) is not None}
        # It sets up truncation and padding, which two threads must not do at once.
        tokenizer(["a", "b"])
        return cls(
            name=name,
            tokenizer=tokenizer,
            context=positions(config),
            vocabulary=config.vocab_size,
            end_ids=frozenset(ends),
            defaults=Sampling(**given),
            answer_template=get_response_template(tokenizer, model),
        )

    @cached_property
    def longest_token(self) -> int:
        """Letters that a token stands for at most."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a plain text."""
        self._check_letters(len(text))
        return tuple(self.tokenizer(text).input_ids)

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> tuple[int, ...]:
        """The tokens of a conversation up to where its next answer begins."""
        if self.tokenizer.chat_template is None:
            message = f"{self.name} has no chat template; use /v1/completions"
            raise ApiError(400, message, code="no_chat_template")
        if taken := sorted(options.keys() & signature(self.tokenizer.apply_chat_template).parameters.keys()):
            # A template of a stranger's own, for one, could compute for hours.
            message = f"chat_template_kwargs: {taken[0]} is not for requests to say"
            raise ApiError(400, message, code="invalid_value", param="chat_template_kwargs")
        self._check_letters(sum(len(message["content"]) for message in messages))
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **options
            )
        except Exception as error:  # whatever a template raises
            said = f"the model's chat template refuses these messages: {error}"
            raise ApiError(400, said, code="chat_template", param="messages") from error
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def form(self, make: Callable[[LLTokenizer], Form], field: str) -> Form:
        """Of answers, in this model's tokens; `field` is that of a request which asks for it."""
        try:
            return make(self._form_tokenizer)
        except ValueError as error:
            raise ApiError(400, f"{field}: {error}", code="invalid_schema", param=field) from error

    @cached_property
    def _form_tokenizer(self) -> LLTokenizer:
        return from_tokenizer(self.tokenizer, eos_token=sorted(self.end_ids) or None)

    def check_tokens(self, tokens: tuple[int, ...], param: str) -> None:
        """Refuse what is no token."""
        if wrong := next((token for token in tokens if not 0 <= token < self.vocabulary), None):
            raise ApiError(400, f"{param}: {wrong} is no token; allowed: 0 to {self.vocabulary - 1}", param=param)

    @property
    def workers(self) -> ThreadPoolExecutor:
        """Threads for `encode` and `encode_chat`."""
        return self._workers

    def _check_letters(self, letters: int) -> None:
        """Refuse at once what cannot have few enough tokens."""
        if self.context is not None and letters > self.context * self.longest_token:
            raise too_long(f"a prompt of {letters} characters", self.context)


def too_long(what: str, context: int) -> ApiError:
    """For a prompt beyond the model's positions."""
    message = f"{what} is longer than the model's context of {context} tokens"
    return ApiError(400, message, code="context_length_exceeded")
