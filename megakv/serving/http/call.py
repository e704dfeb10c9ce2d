"""A call's prompts, limits and form, checked against the model that answers it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template

from megakv.costmodel.config_sizes import positions
from megakv.serving.form import Form
from megakv.serving.http.chat_schemas import ChatBody, ResponseFormat, TextFormat
from megakv.serving.http.errors import ApiError, too_long
from megakv.serving.http.parts import CallsParts, NamedCallParts, Parts, PlainParts, TemplateParts
from megakv.serving.http.prompt_reader import PromptReader
from megakv.serving.http.response_schemas import ResponseBody
from megakv.serving.http.schemas import MOST_TOOLS, SamplingBody
from megakv.serving.http.settings import HttpSettings
from megakv.serving.request import Event, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX_TOKENS = 256
"""Of a prompt's end: the beginning of the answer stands in it, where the chat template writes one."""
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

    def parts(self, prompt: tuple[int, ...], tools: list[dict[str, Any]]) -> Parts:
        """Cuts an answer that is held to nothing; without a template it is all text."""
        if self.answer_template is None:
            return PlainParts()
        return TemplateParts(self.answer_template, self.tokenizer.decode(list(prompt[-PREFIX_TOKENS:])), tools)

    def form(self, make: Callable[[LLTokenizer], Form], field: str) -> Form:
        """Of answers, in this model's tokens; `field` is that of a request which asks for it."""
        try:
            return make(self._form_tokenizer)
        except ValueError as error:
            raise ApiError(400, f"{field}: {error}", code="invalid_schema", param=field) from error

    def form_of(self, grammar: str) -> Form:
        """Form of a grammar that another process has made."""
        return Form.of(grammar, self._form_tokenizer)

    @cached_property
    def _form_tokenizer(self) -> LLTokenizer:
        return from_tokenizer(self.tokenizer, eos_token=sorted(self.end_ids) or None)


@dataclass(frozen=True)
class Held:
    """The form of an answer, and how its text is cut into parts."""

    field: str
    """That asks for it."""
    form: Callable[[LLTokenizer], Form]
    """A ValueError says what cannot be."""
    parts: Callable[[], Parts]


def held_to(body: ChatBody | ResponseBody, given: TextFormat | ResponseFormat | None) -> Held | None:
    """What a body asks for, None where an answer may be anything; an ApiError where fields do not go together."""
    held = _calls(body) if body.must_call else None
    if held is not None and body.stop:
        raise _wrong(held.field, "calls are not cut off by stop; leave one of the two out")
    schema = None if given is None else given.schema_of_json
    if schema is not None:
        if body.functions:
            raise _wrong("response_format", "JSON is not answered together with tools; leave one of the two out")
        held = Held("response_format", partial(Form.json, schema), PlainParts)
    if held is not None and body.ignore_eos:
        raise _wrong(held.field, "it does not go together with ignore_eos; leave one of the two out")
    return held


def _calls(body: ChatBody | ResponseBody) -> Held:
    name, functions = body.named, [(each.name, each.schema_of_arguments) for each in body.functions]
    if not functions:
        raise _wrong("tool_choice", "there are no tools to call; give some, or leave it out")
    if name is None:
        most = 1 if body.parallel_tool_calls is False else MOST_TOOLS
        return Held("tool_choice", partial(Form.calls, functions, most=most), CallsParts)
    schema = dict(functions).get(name)
    if schema is None:
        names = ", ".join(repr(known) for known, _ in functions)
        raise _wrong("tool_choice", f"{name!r} is none of the tools; allowed: {names}")
    return Held("tool_choice", partial(Form.arguments, name, schema), partial(NamedCallParts, name))


def _wrong(field: str, message: str) -> ApiError:
    return ApiError(400, f"{field}: {message}", code="invalid_value", param=field)


FIELDS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
)
LARGEST_SEED = 1 << 63


@dataclass(frozen=True)
class Call:
    """`n` answers to each of some prompts; `request` makes the request for one of them."""

    request: Callable[..., Request]
    sampling: Sampling
    prompts: tuple[tuple[int, ...], ...]
    n: int
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    special: bool = False
    """Whether special tokens are part of the text."""
    continues: bool = False
    """Whether answers go on in the text of their prompt."""

    def requests(self, name: str, sink: Callable[[int, Event], None]) -> list[Request]:
        """All of them, each by a seed of its own, which is drawn here where none is given."""
        found = []
        for index, prompt in enumerate(prompt for prompt in self.prompts for _ in range(self.n)):
            seed = self.sampling.seed
            seed = secrets.randbelow(LARGEST_SEED) if seed is None else (seed + index % self.n) % LARGEST_SEED
            sampling = replace(self.sampling, seed=seed)
            found.append(
                self.request(id=f"{name}-{index}", prompt=prompt, sink=partial(sink, index), sampling=sampling)
            )
        return found


def make_call(
    body: SamplingBody,
    prompts: Sequence[tuple[int, ...]],
    served: ServedModel,
    settings: HttpSettings,
    *,
    key: str,
    user: str,
    asked: int | None,
    usual: int | None = None,
    n: int = 1,
    logprobs: int | None = None,
    generation: dict[str, Any] | None = None,
    continues: bool = False,
    form: Form | None = None,
) -> Call:
    """Checked against the model and the limits; `asked` is how many tokens an answer may have, `usual` where unsaid.

    `generation` are the settings of transformers' own client, which come as one field.
    """
    generation = generation or {}
    asked = generation.get("max_new_tokens") if asked is None else asked
    for tokens in prompts:
        if not tokens:
            raise ApiError(400, "the prompt has no tokens", code="empty_prompt")
        if served.context is not None and len(tokens) + (asked or 1) > served.context:
            raise too_long(f"a prompt of {len(tokens)} tokens with an answer of up to {asked or 1}", served.context)
    if asked is not None and asked > settings.max_new_tokens:
        raise ApiError(400, f"an answer of {asked} tokens: allowed: {settings.max_new_tokens}", code="too_many_tokens")
    if n * len(prompts) > settings.max_choices:
        raise ApiError(400, f"n: {n * len(prompts)} answers in one call; allowed: {settings.max_choices}", param="n")
    most = usual or settings.max_new_tokens
    if served.context is not None:
        most = min(most, *(served.context - len(tokens) for tokens in prompts))
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stop_ids = frozenset() if body.ignore_eos else served.end_ids
    request = partial(
        Request,
        max_new_tokens=min(most, settings.max_new_tokens) if asked is None else asked,
        stop_ids=stop_ids,
        logprobs=logprobs,
        priority=body.priority,
        key=key,
        user=user,
        form=form,
        compresses=body.compress_cache,
        prompt_lookup=body.prompt_lookup,
    )
    special = not continues and served.answer_template is not None
    sampling = _sampling(body, served, generation)
    return Call(request, sampling, tuple(prompts), n, tuple(stops), stop_ids, special, continues)


def read_generation_config(text: str | None) -> dict[str, Any]:
    """Of the field that transformers' client sends, what can be asked for; the rest of it is defaults."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ApiError(400, "generation_config: is not a JSON object in a string", param="generation_config")
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: given[name] for name in names if given.get(name) is not None}
    if given.get("do_sample") is False:
        values["temperature"] = 0.0
    for name, value in values.items():
        kinds = int if name in ("max_new_tokens", "top_k") else (int, float)
        least = {"max_new_tokens": 1, "repetition_penalty": 1e-3}.get(name, 0)
        most = {"top_p": 1, "min_p": 1, "temperature": 2, "repetition_penalty": 10}.get(name, 1 << 31)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise ApiError(400, f"generation_config: {name} is {value!r}; allowed: {least} to {most}")
    return values


def _sampling(body: SamplingBody, served: ServedModel, generation: dict[str, Any]) -> Sampling:
    given = {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
    values = {**{name: value for name, value in generation.items() if name in FIELDS}, **given}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if "seed" in values:
        values["seed"] %= LARGEST_SEED
    return replace(served.defaults, **values, logit_bias=_biases(body.logit_bias, served))


def _biases(given: dict[str, float] | None, served: ServedModel) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in (given or {}).items():
        if not name.isascii() or not name.isdigit() or int(name) >= served.vocabulary:
            message = f"logit_bias: {name!r} is no token; allowed: 0 to {served.vocabulary - 1}"
            raise ApiError(400, message, param="logit_bias")
        biases[int(name)] = bias
    return biases
