"""The next token from its logits, on rank 0, with transformers' own processors where there are such."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from megakv.serving.form import Form, FormState
from megakv.serving.request import Sampling, Token

MOST_SEED = (1 << 63) - 1
LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is all but certain, and logits over it might not be finite."""
LEAST_PENALTY = 1e-3
"""For repetition: what logits are divided by must leave them finite."""
BLOCK = 128
"""Tokens whose probabilities are summed up at once: in which block one is drawn is known before which of it."""
TRIES, LEAST_LEFT = 8, 0.25
"""Tokens that are drawn before those are sorted out that `top_p` and `min_p` leave; none where `top_p` is less."""


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Refuse what cannot be sampled by: a ValueError that names it."""
    allowed = {
        "temperature": (sampling.temperature >= 0, "0 for the likeliest token, or more"),
        "top_p": (0 < sampling.top_p <= 1, "above 0, up to 1"),
        "top_k": (sampling.top_k >= 0, "0 for all tokens, or how many"),
        "min_p": (0 <= sampling.min_p <= 1, "from 0 to 1"),
        "repetition_penalty": (sampling.repetition_penalty >= LEAST_PENALTY, f"{LEAST_PENALTY:g} or more; 1 for none"),
        "presence_penalty": (True, "a number"),
        "frequency_penalty": (True, "a number"),
        "seed": (sampling.seed is None or abs(sampling.seed) <= MOST_SEED, "a whole number of 64 bits"),
    }
    for name, (fits, what) in allowed.items():
        value = getattr(sampling, name)
        if value is not None and not (math.isfinite(value) and fits):
            raise ValueError(f"{name} = {value}: allowed: {what}")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocabulary:
            raise ValueError(f"logit_bias names token {token}: allowed: 0 to {vocabulary - 1}")
        if math.isnan(bias):
            raise ValueError(f"logit_bias of token {token} is {bias}: allowed: a number")


class Sampler:
    """Chooses the tokens of one answer; `logprobs` of how many of the likeliest ones are told, None for not even its
    own. Log probabilities are the model's, before anything else is applied.
    """

    def __init__(self, sampling: Sampling, logprobs: int | None = None, form: Form | None = None):
        self._sampling, self._logprobs = sampling, logprobs
        self._form = form
        self._state: FormState | None = None
        self._likeliest = sampling.temperature < LEAST_TEMPERATURE
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long)
        self._biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        penalty = sampling.repetition_penalty
        self._repetition = None if penalty == 1 else RepetitionPenaltyLogitsProcessor(penalty)
        self._warpers = LogitsProcessorList()
        if not self._likeliest and sampling.temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        # Of the answer so far.
        self._counts: Counter[int] = Counter()
        self._penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is all that is wanted."""
        sampling = self._sampling
        changes = self._penalised or self._repetition is not None or len(sampling.logit_bias) > 0
        return self._likeliest and not changes and self._logprobs is None and self._form is None

    @property
    def problem(self) -> str:
        """Why there is no next token."""
        said = "" if self._state is None else self._state.problem
        return (
            f"the answer's form: {said}"
            if said
            else "logits are not finite: the model may need another dtype, or the request other settings"
        )

    def next(self, logits_V: Tensor, tokens: Sequence[int]) -> Token | None:
        """The next of an answer, behind all `tokens`, those of the prompt included; None where none may come."""
        raw_V = logits_V.float()
        scores_V = raw_V.clone()
        if self._repetition is not None:
            scores_V = self._repetition(torch.tensor([tokens]), scores_V[None])[0]
        if self._penalised and self._counts:
            ids = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            scores_V[ids] -= self._sampling.presence_penalty + self._sampling.frequency_penalty * counts
        if len(self._bias_ids):
            scores_V[self._bias_ids] += self._biases
        if self._form is not None:
            self._state = self._state or self._form.begin()
            allowed_V = self._state.allowed(len(scores_V))
            if not allowed_V.any():
                return None
            scores_V.masked_fill_(~allowed_V, -torch.inf)
        chosen = int(scores_V.argmax()) if self._likeliest else self._drawn(scores_V)
        if chosen is None:
            return None
        if self._state is not None:
            self._state.take(chosen)
        if self._penalised:
            self._counts[chosen] += 1
        if self._logprobs is None:
            return Token(chosen)
        logprobs_V = raw_V.log_softmax(-1)
        values, ids = logprobs_V.topk(min(self._logprobs, len(logprobs_V)))
        return Token(chosen, float(logprobs_V[chosen]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def _drawn(self, scores_V: Tensor) -> int | None:
        """A token that the settings leave: drawn until it is one, as none need be sorted for that; None of none."""
        top_p, min_p = self._sampling.top_p, self._sampling.min_p
        # No processor among these looks at tokens.
        probabilities_V = self._warpers(torch.zeros(1, 0, dtype=torch.long), scores_V[None])[0].softmax(-1)
        running = _RunningSum(probabilities_V, self._generator)
        if not running.finite:
            return None
        if top_p == 1 and not min_p:
            return running.draw()
        for _ in range(TRIES if top_p >= LEAST_LEFT else 0):
            if _among_likeliest(probabilities_V, token := running.draw(), top_p, min_p):
                return token
        # So few are left that they are found sooner than drawn.
        likeliest, tokens = probabilities_V.sort(descending=True, stable=True)
        before = likeliest.cumsum(0, dtype=torch.float64) - likeliest
        likeliest[(before >= top_p) | (likeliest < min_p * likeliest[0])] = 0
        return int(tokens[_RunningSum(likeliest, self._generator).draw()])


class _RunningSum:
    """Probabilities by their running sum: a token is drawn where it exceeds a random number.

    `torch.multinomial` takes ten times as long.
    """

    def __init__(self, probabilities_V: Tensor, generator: torch.Generator):
        self._generator = generator
        self._blocks = F.pad(probabilities_V, (0, -len(probabilities_V) % BLOCK)).view(-1, BLOCK)
        self._sums = self._blocks.sum(-1, dtype=torch.float64)
        self._ends = self._sums.cumsum(0)

    @property
    def finite(self) -> bool:
        """Whether they are numbers."""
        return math.isfinite(self._ends[-1])

    def draw(self) -> int:
        """A token."""
        most = self._ends[-1]
        number = torch.rand((), dtype=torch.float64, generator=self._generator) * most
        number = torch.minimum(number, torch.nextafter(most, 0 * most))
        block = int(torch.searchsorted(self._ends, number, right=True))
        inside = self._blocks[block].cumsum(0, dtype=torch.float64)
        # Summed up in another order they may come to a little less, or more.
        number = (number - (self._ends[block] - self._sums[block])).clamp(min=0)
        number = torch.minimum(number, torch.nextafter(inside[-1], 0 * most))
        return block * BLOCK + int(torch.searchsorted(inside, number, right=True))


def _among_likeliest(probabilities_V: Tensor, token: int, top_p: float, min_p: float) -> bool:
    """Whether likelier ones make up less than `top_p`, and none is so much likelier that `min_p` forbids it."""
    own = probabilities_V[token]
    if min_p > 0 and own < min_p * probabilities_V.max():
        return False
    if top_p == 1:
        return True
    likelier = float(probabilities_V[probabilities_V > own].sum(dtype=torch.float64))
    # Of those as likely, the first ones come first.
    return likelier + float(own) * int((probabilities_V[:token] == own).sum()) < top_p


def sample(logits_BV: Tensor, samplers: Sequence[Sampler], tokens: Sequence[Sequence[int]]) -> list[Token | None]:
    """The next token of each of several answers, from the logits behind its last; None where none can be."""
    largest_B, likeliest_B = logits_BV.max(-1)
    finite, likeliest = largest_B.isfinite().tolist(), likeliest_B.tolist()
    host_BV = logits_BV if all(sampler.plain for sampler in samplers) else logits_BV.cpu()
    found: list[Token | None] = []
    for row, sampler in enumerate(samplers):
        if not finite[row]:
            found.append(None)
        elif sampler.plain:
            found.append(Token(likeliest[row]))
        else:
            found.append(sampler.next(host_BV[row], tokens[row]))
    return found
