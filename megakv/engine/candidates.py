"""Candidates for the tokens that come next: where they come from, and whether they are worth a wider step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
)

from megakv.base.device import random_state, set_random_state
from megakv.base.errors import CombinationError
from megakv.distributed.agreement import Agreement
from megakv.engine.config import MegaKVConfig
from megakv.engine.generation import given_option
from megakv.engine.lookup import NGRAM, TokenLookup
from megakv.injection.interface import ATTEND_ATTRIBUTE
from megakv.injection.policy import depends_on_length

TRUSTED = 2
"""Steps in a row whose first looked-up token came true, from which on what is looked up is worth a wider step."""

Proposal = tuple[Tensor, Tensor | None]
"""``[1, S + c]`` tokens so far and candidates, and ``[1, c, V]`` logits that they were drawn from, if any."""


NAMES = ("prompt_lookup_num_tokens", "assistant_model")
"""Options of `generate` by which candidates are proposed."""


def proposes(model: PreTrainedModel, options: dict[str, Any]) -> bool:
    """Whether a `generate` call checks candidates."""
    return any(given_option(name, options, model) is not None for name in NAMES)


def check_candidates(model: PreTrainedModel, config: MegaKVConfig, options: dict[str, Any], ids: Tensor | None) -> None:
    """Refuse candidates that cannot be checked, or not with what else was asked for."""
    lookup, assistant = (given_option(name, options, model) for name in NAMES)
    if lookup is not None and assistant is not None:
        raise CombinationError("one", f"{' and '.join(NAMES)} both propose the next tokens: give one of the two")
    if lookup is None:
        name = f"assistant_model = {type(assistant).__name__}"
        _check_assistant(name, assistant)
    else:
        name = f"prompt_lookup_num_tokens = {lookup!r}"
        for number in ("prompt_lookup_num_tokens", "max_matching_ngram_size"):
            value = given_option(number, options, model)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{number} = {value!r}: allowed: a whole number, 1 or more")
        if given_option("assistant_ensemble_weight", options, model) is not None:
            raise CombinationError(
                "needs", f"assistant_ensemble_weight weighs an assistant's logits, and {name} has none: leave it out"
            )
    if ids is None:
        raise ValueError(f"{name} without input_ids: candidates continue tokens, so give the prompt as tokens")
    rows = len(ids) * (given_option("num_return_sequences", options, model) or 1)
    if rows > 1:
        raise ValueError(
            f"{name} with {rows} sequences: each would have another number of tokens checked in a step; give one "
            "sequence, or leave it out"
        )
    if (beams := given_option("num_beams", options, model) or 1) > 1:
        raise CombinationError("one", f"{name} and num_beams = {beams} both choose what is computed next: give one")
    if given_option("use_cache", options, model) is False:
        raise CombinationError("needs", f"{name} has no effect without a cache: leave out use_cache = False")
    interval = config.megakv.fairkv.decode_interval
    if interval is not None:
        raise CombinationError(
            "room",
            f"{name} with megakv.fairkv.decode_interval = {interval}: a refused candidate takes back what it has "
            "replaced, for which such a budget has no room; leave out one of the two",
        )
    if depends_on_length(model):
        raise ValueError(
            f"{name} is not supported for model type {model.config.model_type!r}: its rotary frequencies follow the "
            "length, so that candidates would change what tokens before them see; leave it out"
        )


def _check_assistant(name: str, assistant: Any) -> None:
    if not isinstance(assistant, PreTrainedModel):
        raise ValueError(f"{name}: allowed: a transformers model, which rank 0 runs")
    if any(hasattr(module, ATTEND_ATTRIBUTE) for module in assistant.modules()):
        raise ValueError(f"{name} belongs to an engine, but rank 0 runs an assistant alone: load it a second time")
    if type(assistant).__name__.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant")):
        raise ValueError(f"{name} proposes tokens from hidden states, which stay on the rank that computed them")


class Source(Protocol):
    """Where candidates come from."""

    def propose(self, input_ids: Tensor) -> Proposal:
        """The same on every rank; every rank must call it."""

    def learn(self, input_ids: Tensor, scores: Tensor, matches: int) -> None:
        """So many of the latest candidates were right."""

    def close(self) -> None:
        """The call is over."""


class Lookup:
    """Prompt lookup where tokens are chosen greedily: each rank looks for itself, in tokens that are the same on all.

    Looking up costs next to nothing, a wider step does not. So what is looked up is proposed as long as its first token
    comes true. Before it has at first, and after a miss until it has `TRUSTED` times in a row, it is only compared with
    what comes: that is decided by tokens alone, on every rank alike. Nothing is proposed beyond the last token that may
    come.
    """

    def __init__(self, config: GenerationConfig):
        stops = config._eos_token_tensor
        self._stops = frozenset(() if stops is None else stops.flatten().tolist())
        self._most, self._width = config.max_length, config.prompt_lookup_num_tokens
        self._tokens = TokenLookup(self._width, config.max_matching_ngram_size or NGRAM)
        self._hits = TRUSTED - 1

    def propose(self, input_ids: Tensor) -> Proposal:
        right, missed = self._tokens.add(input_ids[0, self._tokens.length :].tolist())
        if right or missed:
            self._hits = self._hits + 1 if right else 0
        if self._hits < TRUSTED:
            return input_ids, None
        guess = self._tokens.guess(min(self._width, self._most - 1 - input_ids.shape[1]), self._stops)
        return torch.cat([input_ids, input_ids.new_tensor([guess])], dim=1), None

    def learn(self, input_ids: Tensor, scores: Tensor, matches: int) -> None:
        """Nothing that the tokens themselves do not say."""

    def close(self) -> None:
        """Nothing is held."""


class RankZeroSource:
    """What rank 0's generator of transformers proposes, on every rank; the others have None.

    An assistant's floats differ between machines, and so do those by which samplers forbid candidates: with other
    candidates ranks would wait for each other. With `logits` those that candidates were drawn from come along, and with
    `draws` rank 0's random state, from which it took numbers that the others did not take.
    """

    def __init__(
        self,
        generator: CandidateGenerator | None,
        agreement: Agreement,
        device: torch.device,
        *,
        logits: bool,
        draws: bool,
    ):
        self._generator, self._agreement, self._device = generator, agreement, device
        self._logits, self._draws = logits, draws

    def propose(self, input_ids: Tensor) -> Proposal:
        length = input_ids.shape[1]

        def ask() -> tuple[Tensor, Tensor | None, list[Tensor] | None]:
            assert self._generator is not None
            found, logits = self._generator.get_candidates(input_ids)
            wanted = logits.cpu() if self._logits and logits is not None else None
            return found[:, length:].cpu(), wanted, random_state(self._device) if self._draws else None

        candidates, logits, states = self._agreement.decide(ask)
        if states is not None:
            set_random_state(states, self._device)
        return torch.cat([input_ids, candidates.to(input_ids)], dim=1), logits

    def learn(self, input_ids: Tensor, scores: Tensor, matches: int) -> None:
        if self._generator is not None:
            self._generator.update_candidate_strategy(input_ids, scores, matches)

    def close(self) -> None:
        """What the schedule "heuristic" has come to holds for the assistant's next call, as in transformers."""
        generator = self._generator
        if isinstance(generator, AssistedCandidateGenerator):
            config = generator.assistant_model.generation_config
            if config.num_assistant_tokens_schedule == "heuristic":
                config.num_assistant_tokens = generator.num_assistant_tokens


class Candidates(CandidateGenerator):
    """What transformers' loop of assisted decoding asks for candidates, and what came of them.

    Of the step under way, `before` are the tokens that were there, and `width` the candidates. `computed` says whether
    the model has seen them. With the prompt, whose pass is like any other prompt's, candidates come only where
    `with_prompt` asks for it: where the random numbers are to be those that transformers draws.
    """

    def __init__(self, make_source: Callable[[], Source], *, with_prompt: bool):
        self._source, self._with_prompt = make_source(), with_prompt
        self.before = self.width = 0
        self.computed = False
        self.steps = self.proposed = self.accepted = 0

    def get_candidates(self, input_ids: Tensor, **kwargs: object) -> Proposal:
        """Of a step that begins."""
        self.before, self.computed = input_ids.shape[1], False
        found: Proposal = (input_ids, None)
        if self.steps or self._with_prompt:
            found = self._source.propose(input_ids)
        self.width = found[0].shape[1] - self.before
        return found

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Of a step that ends."""
        self.steps += 1
        self.proposed += self.width
        self.accepted += int(num_matches)
        self._source.learn(input_ids, scores, int(num_matches))

    def close(self) -> None:
        """The call is over."""
        self._source.close()
