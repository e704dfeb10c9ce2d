"""What requests need to know of the model that answers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template

from megakv.costmodel.config_sizes import positions
from megakv.serving.form import Form
from megakv.serving.http.errors import ApiError
from megakv.serving.http.prompt_reader import PromptReader
from megakv.serving.request import Sampling

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
    def reader(self) -> PromptReader:
        """Makes tokens of texts."""
        return PromptReader(self.name, self.tokenizer, self.context, self.vocabulary)

    def form(self, make: Callable[[LLTokenizer], Form], field: str) -> Form:
        """Of answers, in this model's tokens; `field` is that of a request which asks for it."""
        try:
            return make(self._form_tokenizer)
        except ValueError as error:
            raise ApiError(400, f"{field}: {error}", code="invalid_schema", param=field) from error

    @cached_property
    def _form_tokenizer(self) -> LLTokenizer:
        return from_tokenizer(self.tokenizer, eos_token=sorted(self.end_ids) or None)
