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

from megakv.costmodel.config_sizes import positions
from megakv.serving.form import Form
from megakv.serving.http.answer_forms import answer_template
from megakv.serving.http.either import Opening
from megakv.serving.http.errors import ApiError, shown, too_long
from megakv.serving.http.held import Held
from megakv.serving.http.parts import Contents, Parts, PlainParts, TemplateParts, thoughts_end
from megakv.serving.http.prompt_reader import PromptReader
from megakv.serving.http.schemas import NO_LIMIT, CompletionBody, SamplingBody
from megakv.serving.http.settings import HttpSettings
from megakv.serving.http.thoughts import ThoughtParts, form_behind
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
    """How answers are cut into text, reasoning and calls of tools, in transformers' words; None where nobody knows."""

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
            answer_template=answer_template(tokenizer, model),
        )

    @cached_property
    def reader(self) -> PromptReader:
        """Makes tokens of texts."""
        return PromptReader(self.name, self.tokenizer, self.context, self.vocabulary)

    def parts(self, prompt: tuple[int, ...], tools: list[dict[str, Any]]) -> Parts:
        """Cuts an answer that is held to nothing; without a template it is all text."""
        if self.answer_template is None:
            return PlainParts()
        return TemplateParts(self.answer_template, self._prefix(prompt), tools)

    def contents(self, prompt: tuple[int, ...], tools: list[dict[str, Any]]) -> Contents | None:
        """Says where the content of such an answer is; None where it is all."""
        if self.answer_template is None:
            return None
        return Contents(self.answer_template, self._prefix(prompt), tools)

    def _prefix(self, prompt: tuple[int, ...]) -> str:
        text: str = self.tokenizer.decode(list(prompt[-PREFIX_TOKENS:]))
        return text

    @cached_property
    def opening(self) -> Opening | None:
        """What calls begin with, as the model writes them."""
        return Opening.of(self.answer_template, self.tokenizer)

    def form(self, make: Callable[[LLTokenizer], Form], field: str) -> Form:
        """Of answers, in this model's tokens; `field` is that of a request which asks for it."""
        try:
            return make(self._form_tokenizer)
        except ValueError as error:
            raise ApiError(400, f"{field}: {error}", code="invalid_schema", param=field) from error

    def behind_thoughts(self, held: Held | None, prompt: tuple[int, ...]) -> Held | None:
        """What an answer is held to when the reasoning ends that its prompt has begun."""
        end = None if held is None else thoughts_end(self.answer_template, self._prefix(prompt))
        if held is None or end is None:
            return held

        def form(words: LLTokenizer) -> Form:
            return form_behind(held.form(words), end, self.tokenizer, words)

        return replace(held, form=form, parts=partial(ThoughtParts, end, held.parts), thinks=True)

    def form_of(self, grammar: str) -> Form:
        """Form of a grammar that another process has made."""
        return Form.of(grammar, self._form_tokenizer)

    @cached_property
    def _form_tokenizer(self) -> LLTokenizer:
        return from_tokenizer(self.tokenizer, eos_token=sorted(self.end_ids) or None)


FIELDS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "min_tokens"),
)
LARGEST_SEED = 1 << 63
MOST_SCORES = 1 << 20
"""Log probabilities of a call's prompts: all are there before the first token."""


@dataclass(frozen=True)
class Call:
    """`n` answers to each of some prompts; `request` makes the request for one of them."""

    request: Callable[..., Request]
    sampling: Sampling
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    """Tokens of an answer to each prompt at most; 0 for one of no tokens, whose prompt is read all the same."""
    n: int
    stops: tuple[str, ...]
    silent_ids: frozenset[int]
    """Tokens that end an answer and are no part of its text."""
    special: bool = False
    """Whether special tokens are part of the text."""
    shows_stops: bool = False
    """Whether the text that stops it is."""
    continues: bool = False
    """Whether answers go on in the text of their prompt."""

    def requests(self, name: str, sink: Callable[[int, Event], None]) -> list[Request]:
        """All of them, each by a seed of its own, which is drawn here where none is given."""
        found = []
        pairs = zip(self.prompts, self.lengths, strict=True)
        for index, (prompt, length) in enumerate(pair for pair in pairs for _ in range(self.n)):
            seed = self.sampling.seed
            seed = secrets.randbelow(LARGEST_SEED) if seed is None else (seed + index % self.n) % LARGEST_SEED
            sampling = replace(self.sampling, seed=seed)
            own = {"id": f"{name}-{index}", "max_new_tokens": length, "sink": partial(sink, index)}
            request = self.request(prompt=prompt, sampling=sampling, **own)
            # The prompt's own are told once.
            found.append(replace(request, prompt_logprobs=None) if index % self.n else request)
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
    prompt_logprobs: int | None = None,
    generation: dict[str, Any] | None = None,
    continues: bool = False,
    form: Form | None = None,
) -> Call:
    """Checked against the model and the limits; `asked` is how many tokens an answer may have, `usual` where unsaid.

    An answer ends at the first limit, whatever more is asked for. `generation` are the settings of transformers' own
    client, which come as one field.
    """
    generation = generation or {}
    asked = generation.get("max_new_tokens") if asked is None else asked
    for tokens in prompts:
        if not tokens:
            raise ApiError(400, "the prompt has no tokens", code="empty_prompt")
        if served.context is not None and len(tokens) + (least := asked != 0) > served.context:
            raise too_long(f"a prompt of {len(tokens)} tokens with {int(least)} of an answer", served.context)
    if prompt_logprobs is not None and sum(map(len, prompts)) * (prompt_logprobs + 1) > MOST_SCORES:
        wanted = f"{sum(map(len, prompts))} tokens of prompts with {prompt_logprobs + 1} log probabilities each"
        raise ApiError(400, f"logprobs: {wanted}; allowed: {MOST_SCORES} in all", param="logprobs")
    if n * len(prompts) > settings.max_choices:
        raise ApiError(400, f"n: {n * len(prompts)} answers in one call; allowed: {settings.max_choices}", param="n")
    most = min((usual or NO_LIMIT) if asked is None else asked, settings.max_new_tokens)
    rooms = [most if served.context is None else served.context - len(tokens) for tokens in prompts]
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    asked_ids = _stop_ids(body.stop_token_ids, served)
    end_ids = frozenset() if body.ignore_eos else served.end_ids
    stop_ids = end_ids | asked_ids
    shows_stops = bool(body.include_stop_str_in_output)
    silent_ids = stop_ids if not shows_stops else end_ids - asked_ids if body.skip_special_tokens else frozenset[int]()
    if (least := body.min_tokens or 0) > most:
        raise ApiError(400, f"min_tokens: {least} is above the {most} that an answer may have", param="min_tokens")
    request = partial(
        Request,
        stop_ids=stop_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=body.priority,
        key=key,
        user=user,
        form=form,
        compresses=body.compress_cache,
        prompt_lookup=body.prompt_lookup,
    )
    marks = not isinstance(body, CompletionBody) and served.answer_template is not None
    special = not body.skip_special_tokens or marks
    sampling = _sampling(body, served, generation)
    lengths = tuple(min(most, room) for room in rooms)
    return Call(
        request, sampling, tuple(prompts), lengths, n, tuple(stops), silent_ids, special, shows_stops, continues
    )


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
            message = f"generation_config: {name} is {shown(value)}; allowed: {least} to {most}"
            raise ApiError(400, message, code="invalid_value", param="generation_config")
    return values


def _sampling(body: SamplingBody, served: ServedModel, generation: dict[str, Any]) -> Sampling:
    given = {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
    values = {**{name: value for name, value in generation.items() if name in FIELDS}, **given}
    if values.get("top_p") == 0:
        # No more than the likeliest token.
        values |= {"temperature": 0.0, "top_p": 1.0}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if "seed" in values:
        values["seed"] %= LARGEST_SEED
    return replace(served.defaults, **values, logit_bias=_biases(body.logit_bias, served))


def _stop_ids(given: list[int] | None, served: ServedModel) -> frozenset[int]:
    for token in given or ():
        if not 0 <= token < served.vocabulary:
            message = f"stop_token_ids: {token} is no token; allowed: 0 to {served.vocabulary - 1}"
            raise ApiError(400, message, param="stop_token_ids")
    return frozenset(given or ())


def _biases(given: dict[str, float] | None, served: ServedModel) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in (given or {}).items():
        if not name.isascii() or not name.isdigit() or int(name) >= served.vocabulary:
            message = f"logit_bias: {name!r} is no token; allowed: 0 to {served.vocabulary - 1}"
            raise ApiError(400, message, param="logit_bias")
        biases[int(name)] = bias
    return biases
