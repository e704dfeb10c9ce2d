"""What tokens that are there already lose of their logits, at a price that does not grow with how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from megakv.serving.request import Sampling


class Penalties:
    """Those of one answer: `repetition_penalty` on tokens of prompt and answer, as transformers has it, presence and
    frequency on the answer's alone, as OpenAI does.

    What it holds is as large as the vocabulary, and comes with the first token.
    """

    def __init__(self, sampling: Sampling):
        penalty = sampling.repetition_penalty
        self._repetition = None if penalty == 1 else RepetitionPenaltyLogitsProcessor(float(penalty))
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._counted = self._presence != 0 or self._frequency != 0
        # Which tokens there are, in ascending order once they are asked for, and how many of them were looked at.
        self._there_V: Tensor | None = None
        self._ids_1N: Tensor | None = None
        self._looked_at = 0
        # How often each is in the answer, and what it loses by that.
        self._counts: dict[int, int] = {}
        self._losses_V: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._counted or self._repetition is not None

    def apply(self, scores_V: Tensor, tokens: Sequence[int]) -> Tensor:
        """Scores less what these tokens cost, those of the prompt included: the same as before, and some more."""
        if self._repetition is not None:
            scores_V = self._repetition(self._ids(tokens, len(scores_V)), scores_V[None])[0]
        return scores_V if self._losses_V is None else scores_V - self._losses_V

    def take(self, token: int, vocabulary: int) -> None:
        """The answer has one more token."""
        if not self._counted:
            return
        if self._losses_V is None:
            self._losses_V = torch.zeros(vocabulary)
        self._counts[token] = count = self._counts.get(token, 0) + 1
        self._losses_V[token] = self._presence + self._frequency * torch.tensor(count, dtype=torch.float32)

    def _ids(self, tokens: Sequence[int], vocabulary: int) -> Tensor:
        """``[1, N]`` every token that is there, once."""
        if self._there_V is None:
            self._there_V = torch.zeros(vocabulary, dtype=torch.bool)
        new = tokens[self._looked_at :]
        self._looked_at = len(tokens)
        if self._ids_1N is None or not all(self._there_V[token] for token in new):
            self._there_V[torch.tensor(new, dtype=torch.long)] = True
            self._ids_1N = self._there_V.nonzero().T
        return self._ids_1N
