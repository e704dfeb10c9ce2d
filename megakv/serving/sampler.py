"""The next token from its logits, on rank 0, with transformers' own processors where there are such."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from megakv.serving.form import Form, FormState
from megakv.serving.penalties import Penalties
from megakv.serving.request import Request, Sampling, Token

MOST_SEED = (1 << 63) - 1
LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is all but certain, and logits over it might not be finite."""
LEAST_PENALTY = 1e-3
"""For repetition: what logits are divided by must leave them finite."""
BLOCK = 128
"""Tokens whose probabilities are summed up at once: in which block one is drawn is known before which of it."""
DRAWN_ROWS = 16
"""Answers whose tokens are drawn together: their probabilities stay in the last cache."""
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
        "min_tokens": (sampling.min_tokens >= 0, "0 or more"),
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
    own. Log probabilities are the model's, before anything else is applied. None of `end_ids` comes before
    `min_tokens` have come.
    """

    def __init__(
        self,
        sampling: Sampling,
        logprobs: int | None = None,
        form: Form | None = None,
        end_ids: Collection[int] = (),
    ):
        self.sampling, self._logprobs = sampling, logprobs
        self._form = form
        self._state: FormState | None = None
        self._likeliest = sampling.temperature < LEAST_TEMPERATURE
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long)
        self._biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self._penalties = Penalties(sampling)
        self._warpers = LogitsProcessorList()
        if not self._likeliest and sampling.temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        # None of these comes among so many first tokens.
        self._end_ids, self._early = torch.tensor(sorted(end_ids), dtype=torch.long), sampling.min_tokens

    @classmethod
    def of(cls, request: Request) -> Sampler:
        """That of a request."""
        return cls(request.sampling, request.logprobs, request.form, request.stop_ids)

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is all that is wanted."""
        return self._likeliest and not self._changes

    @property
    def _changes(self) -> bool:
        """Whether anything but the logits of a token says which one it is, or more than a token is wanted."""
        changes = bool(self._penalties) or len(self.sampling.logit_bias) > 0 or self._early > 0
        return changes or self._logprobs is not None or self._form is not None

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
        scores_V = self._penalties.apply(raw_V.clone(), tokens)
        if len(self._bias_ids):
            scores_V[self._bias_ids] += self._biases
        if self._early:
            scores_V[self._end_ids] = -torch.inf
        if self._form is not None:
            self._state = self._state or self._form.begin()
            allowed_V = self._state.allowed(len(scores_V))
            if not allowed_V.any():
                return None
            scores_V.masked_fill_(~allowed_V, -torch.inf)
        chosen = int(scores_V.argmax()) if self._likeliest else self.drawn(scores_V)
        if chosen is None:
            return None
        if self._state is not None:
            self._state.take(chosen)
        self._penalties.take(chosen, len(raw_V))
        self._early -= self._early > 0
        if self._logprobs is None:
            return Token(chosen)
        logprobs_V = raw_V.log_softmax(-1)
        values, ids = logprobs_V.topk(min(self._logprobs, len(logprobs_V)))
        return Token(chosen, float(logprobs_V[chosen]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    @property
    def draws(self) -> bool:
        """Whether a token is drawn from all that the temperature makes of the logits: many such are drawn together."""
        return not (self._likeliest or self._changes or self.sampling.top_k)

    def drawn(self, scores_V: Tensor) -> int | None:
        """A token that the settings leave, None of none."""
        # No processor among these looks at tokens.
        probabilities_1V = self._warpers(torch.zeros(1, 0, dtype=torch.long), scores_V[None])[0].softmax(-1)[None]
        return draw(probabilities_1V, [self])[0]


def _blocks(x_NV: Tensor) -> Tensor:
    """``[N, n, BLOCK]`` of rows, zeros behind the last number: their sums do not depend on how many rows there are."""
    missing = -x_NV.shape[1] % BLOCK
    return (F.pad(x_NV, (0, missing)) if missing else x_NV).unflatten(1, (-1, BLOCK))


class _RunningSums:
    """Rows of probabilities by their running sums: a token is drawn where it exceeds a random number.

    `torch.multinomial` takes ten times as long. No row's tokens depend on which others there are.
    """

    def __init__(self, probabilities_NV: Tensor):
        self._blocks = _blocks(probabilities_NV)
        self._sums = self._blocks.sum(-1, dtype=torch.float64)
        self._ends = self._sums.cumsum(1)

    @property
    def finite(self) -> list[bool]:
        """Which are numbers."""
        found: list[bool] = self._ends[:, -1].isfinite().tolist()
        return found

    def draw(self, rows: Sequence[int], generators: Sequence[torch.Generator]) -> list[int]:
        """A token of each of some rows."""
        at = torch.tensor(rows)
        ends, sums = self._ends[at], self._sums[at]
        most = ends[:, -1:]
        drawn = [torch.rand((), dtype=torch.float64, generator=own) for own in generators]
        numbers = torch.stack(drawn)[:, None] * most
        numbers = torch.minimum(numbers, torch.nextafter(most, 0 * most))
        block = torch.searchsorted(ends, numbers, right=True)
        inside = self._blocks[at, block[:, 0]].cumsum(1, dtype=torch.float64)
        # Summed up in another order they may come to a little less, or more.
        numbers = (numbers - (ends - sums).gather(1, block)).clamp(min=0)
        numbers = torch.minimum(numbers, torch.nextafter(inside[:, -1:], 0 * most))
        found: list[int] = (block * BLOCK + torch.searchsorted(inside, numbers, right=True))[:, 0].tolist()
        return found


def draw(probabilities_NV: Tensor, samplers: Sequence[Sampler]) -> list[int | None]:
    """A token of each row that its settings leave: drawn until it is one, as none need be sorted for that; None of
    none.
    """
    sums, settings = _RunningSums(probabilities_NV), [sampler.sampling for sampler in samplers]
    left = [row for row, finite in enumerate(sums.finite) if finite]
    found = dict[int, int]()
    trying = [row for row in left if settings[row].top_p >= LEAST_LEFT]
    for _ in range(TRIES):
        if not trying:
            break
        tokens = sums.draw(trying, [samplers[row].generator for row in trying])
        among = _among_likeliest(probabilities_NV, trying, tokens, [settings[row] for row in trying])
        found |= {row: token for row, token, kept in zip(trying, tokens, among, strict=True) if kept}
        trying = [row for row, kept in zip(trying, among, strict=True) if not kept]
    for row in left:
        if row not in found:
            # So few are left that they are found sooner than drawn.
            likeliest, tokens_V = probabilities_NV[row].sort(descending=True, stable=True)
            before = likeliest.cumsum(0, dtype=torch.float64) - likeliest
            likeliest[(before >= settings[row].top_p) | (likeliest < settings[row].min_p * likeliest[0])] = 0
            (first,) = _RunningSums(likeliest[None]).draw([0], [samplers[row].generator])
            found[row] = int(tokens_V[first])
    return [found.get(row) for row in range(len(samplers))]


def _among_likeliest(
    probabilities_NV: Tensor, rows: Sequence[int], tokens: Sequence[int], settings: Sequence[Sampling]
) -> list[bool]:
    """Whether likelier ones make up less than `top_p`, and none is so much likelier that `min_p` forbids it: of a token
    of each of some rows.
    """
    kept = [True] * len(rows)
    some = [at for at, own in enumerate(settings) if own.top_p < 1 or own.min_p > 0]
    if not some:
        return kept
    at, chosen = torch.tensor([rows[each] for each in some]), torch.tensor([tokens[each] for each in some])
    values_nV = probabilities_NV if at.tolist() == list(range(len(probabilities_NV))) else probabilities_NV[at]
    own_n1 = values_nV.gather(1, chosen[:, None])
    likelier = _blocks(torch.where(values_nV > own_n1, values_nV, 0)).sum(-1, dtype=torch.float64).sum(-1)
    own, mass, most = own_n1[:, 0].numpy(), likelier.tolist(), values_nV.amax(1).numpy()
    for index, each in enumerate(some):
        top_p, min_p = settings[each].top_p, np.float32(settings[each].min_p)
        if top_p < 1 and mass[index] < top_p:
            # Of those as likely, the first ones come first.
            before = np.count_nonzero(values_nV[index, : tokens[each]].numpy() == own[index])
            kept[each] = mass[index] + float(own[index]) * before < top_p
        else:
            kept[each] = top_p == 1
        kept[each] &= min_p == 0 or bool(own[index] >= min_p * most[index])
    return kept


def _likeliest(logits_BV: Tensor) -> tuple[list[bool], list[int]]:
    """Which rows are numbers, and the first largest of each."""
    if logits_BV.device.type != "cpu":
        largest_B, likeliest_B = logits_BV.max(-1)
        return largest_B.isfinite().tolist(), likeliest_B.tolist()
    # Three to ten times as fast there.
    scores_BV = logits_BV.float().numpy()
    found_B = scores_BV.argmax(1)
    return np.isfinite(scores_BV[np.arange(len(found_B)), found_B]).tolist(), found_B.tolist()


def sample(logits_BV: Tensor, samplers: Sequence[Sampler], tokens: Sequence[Sequence[int]]) -> list[Token | None]:
    """The next token of each of several answers, from the logits behind its last; None where none can be."""
    found: list[Token | None] = [None] * len(samplers)
    drawn = [row for row, sampler in enumerate(samplers) if sampler.draws]
    for first in range(0, len(drawn), DRAWN_ROWS):
        rows = drawn[first : first + DRAWN_ROWS]
        own = [samplers[row] for row in rows]
        scores_NV = logits_BV[rows].to("cpu", torch.float32)
        temperatures_N1 = torch.tensor([[sampler.sampling.temperature] for sampler in own])
        for row, token in zip(rows, draw((scores_NV / temperatures_N1).softmax(-1), own), strict=True):
            found[row] = None if token is None else Token(token)
    if len(drawn) == len(samplers):
        return found
    finite, likeliest = _likeliest(logits_BV)
    host_BV = logits_BV if all(sampler.plain or sampler.draws for sampler in samplers) else logits_BV.cpu()
    for row, sampler in enumerate(samplers):
        if not finite[row] or sampler.draws:
            continue
        found[row] = Token(likeliest[row]) if sampler.plain else sampler.next(host_BV[row], tokens[row])
    return found
