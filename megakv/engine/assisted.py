"""Several tokens per step: transformers' own assisted decoding, of a model that is spread over ranks.

Candidates are checked in one pass that computes them all, and what of the cache belongs to refused ones is cut back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList

from megakv.distributed.agreement import Agreement
from megakv.engine.candidates import Candidates, Lookup, RankZeroSource, Source
from megakv.engine.generation_call import RankZero
from megakv.forward.pass_plan import Generation


class AssistedModel:
    """A model as transformers' loop of assisted decoding is to see it, for one `generate` call.

    The loop takes its candidates from here, which are rank 0's, and its stopping criteria: those are asked after every
    token, as where there is one in a step. A prompt is read before any candidates, in the pieces that were asked for,
    so that it is a turn like any other. All else is the model's.
    """

    _assisted_decoding = GenerationMixin._assisted_decoding

    def __init__(self, model: PreTrainedModel, generation: Generation, rank_zero: RankZero, agreement: Agreement):
        self._model, self._generation, self._rank_zero = model, generation, rank_zero
        self._agreement = agreement
        self._chunk: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, input_ids: Tensor | None, **options: Any) -> Any:
        """transformers' `generate`; what came behind the token at which it was to stop is taken away."""
        try:
            output = type(self._model).generate(self, input_ids, **options)
        finally:
            if self._rank_zero.candidates is not None:
                self._rank_zero.candidates.close()
        return self._cut(output)

    def _cut(self, output: Any) -> Any:
        sequences = output if isinstance(output, Tensor) else output.sequences
        end = self._rank_zero.stop_length
        beyond = 0 if end is None else sequences.shape[1] - end
        if not beyond:
            return output
        self._generation.cache.crop(-beyond)
        if isinstance(output, Tensor):
            return output[:, :end]
        output.sequences = sequences[:, :end]
        for name in ("scores", "logits"):
            if (found := output.get(name)) is not None:
                output[name] = found[: len(found) - beyond]
        return output

    def _get_stopping_criteria(self, **given: Any) -> StoppingCriteriaList:
        every = self._model._get_stopping_criteria(**given)
        self._rank_zero.take_over([criterion for criterion in every if criterion is not self._rank_zero])
        return StoppingCriteriaList([self._rank_zero])

    def _get_candidate_generator(self, **given: Any) -> Candidates:
        config: GenerationConfig = given["generation_config"]
        self._chunk = config.prefill_chunk_size
        # An assistant must read the prompt in any case, and begins with it.
        with_prompt = bool(config.do_sample) or config.prompt_lookup_num_tokens is None
        found = Candidates(lambda: self._source(config, given), with_prompt=with_prompt)
        self._rank_zero.candidates = found
        return found

    def _source(self, config: GenerationConfig, given: dict[str, Any]) -> Source:
        looks_up, samples = config.prompt_lookup_num_tokens is not None, bool(config.do_sample)
        if looks_up and not samples:
            return Lookup(config)
        first, device = self._rank_zero.comm.mesh.rank == 0, self._rank_zero.comm.mesh.device
        generator = self._agreement.together(lambda: self._model._get_candidate_generator(**given) if first else None)
        weighs = samples or getattr(config, "assistant_ensemble_weight", None) is not None
        draws = samples and not looks_up
        return RankZeroSource(generator, self._agreement, device, logits=weighs and not looks_up, draws=draws)

    def __call__(self, **inputs: Any) -> Any:
        candidates = self._rank_zero.candidates
        assert candidates is not None
        compute = self._pass if candidates.steps else self._prompt
        try:
            return compute(inputs, candidates.width)
        finally:
            self._generation.proposed = 0
            candidates.computed = True

    def _pass(self, inputs: dict[str, Any], proposed: int) -> Any:
        self._generation.proposed = proposed
        return self._model(**inputs)

    def _prompt(self, inputs: dict[str, Any], proposed: int) -> Any:
        """Its pieces, and then the candidates alone. What is cached of it is among the inputs, too."""
        cached, length = self._generation.cache.length, inputs["input_ids"].shape[1]
        end = length - proposed
        edges = [*range(cached, end, self._chunk or length), end]
        for bounds in pairwise(edges):
            output = self._pass(_piece(inputs, *bounds, logits=1), 0)
        if not proposed:
            return output
        behind = self._pass(_piece(inputs, end, length, logits=proposed), proposed)
        behind.logits = torch.cat([output.logits[:, -1:], behind.logits], dim=1)
        return behind


def _piece(inputs: dict[str, Any], first: int, stop: int, *, logits: int) -> dict[str, Any]:
    """The inputs of a pass over some of the tokens that there are."""
    piece = inputs | {"input_ids": inputs["input_ids"][:, first:stop]}
    if (positions := inputs.get("position_ids")) is not None:
        # Those of what is cached may have been left out.
        absent = inputs["input_ids"].shape[1] - positions.shape[-1]
        piece["position_ids"] = positions[..., first - absent : stop - absent]
    if (mask := inputs.get("attention_mask")) is not None:
        piece["attention_mask"] = mask[:, :stop]
    return piece | ({"logits_to_keep": logits} if "logits_to_keep" in inputs else {})
