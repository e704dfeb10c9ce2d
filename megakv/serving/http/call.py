"""What one call asks of the serving loop: prompts, how tokens are chosen, when answers end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megakv.serving.form import Form
from megakv.serving.http.errors import ApiError, too_long
from megakv.serving.http.schemas import SamplingBody
from megakv.serving.http.served_model import ServedModel
from megakv.serving.http.settings import HttpSettings
from megakv.serving.request import Sampling

FIELDS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
)
LARGEST_SEED = 1 << 63


@dataclass(frozen=True)
class Call:
    """`n` answers to each of some prompts."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    logprobs: int | None
    priority: int
    key: str
    user: str
    special: bool = False
    """Whether special tokens are part of the text."""
    continues: bool = False
    """Whether answers go on in the text of their prompt."""
    form: Form | None = None
    """What the text must be."""
    compresses: bool = False
    """As of a `Request`."""

    def sampling_of(self, choice: int) -> Sampling:
        """Answers to the same prompt differ, each by a seed of its own."""
        seed = self.sampling.seed
        return (
            self.sampling if seed is None or not choice else replace(self.sampling, seed=(seed + choice) % LARGEST_SEED)
        )


def make_call(
    body: SamplingBody,
    prompts: Sequence[tuple[int, ...]],
    served: ServedModel,
    settings: HttpSettings,
    *,
    key: str,
    user: str,
    asked: int | None,
    usual: int | None,
    n: int = 1,
    logprobs: int | None = None,
    generation: dict[str, Any] | None = None,
    special: bool = False,
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
    return Call(
        prompts=tuple(prompts),
        n=n,
        max_new_tokens=min(most, settings.max_new_tokens) if asked is None else asked,
        sampling=_sampling(body, served, generation),
        stops=tuple(stops),
        stop_ids=frozenset() if body.ignore_eos else served.end_ids,
        logprobs=logprobs,
        priority=body.priority,
        key=key,
        user=user,
        special=special,
        continues=continues,
        form=form,
        compresses=body.compress_cache,
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
