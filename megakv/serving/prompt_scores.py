"""Log probabilities of a prompt's own tokens, from the logits behind those before them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megakv.serving.answer import Part
from megakv.serving.request import Scored, Token

MOST_ROWS = 128
"""Tokens of a prompt whose logits a pass gives at most: those of one token may be half a megabyte."""
BLOCK_ROWS = 16
"""Rows whose log probabilities are there at a time."""


def tell_scores(part: Part, logits_RV: Tensor) -> None:
    """Tell log probabilities of the prompt's tokens behind those that a pass of its own has read."""
    answer, request = part.answer, part.answer.request
    # After a failure some are told already.
    tokens = request.prompt[answer.scored : answer.cached + 1]
    if tokens and request.prompt_logprobs is not None:
        first = answer.scored - 1 - (answer.cached - part.new)
        request.sink(Scored(scored(logits_RV[first:], tokens, request.prompt_logprobs)))
        answer.scored += len(tokens)


def scored(logits_NV: Tensor, tokens: Sequence[int], most: int) -> tuple[Token, ...]:
    """Tokens, each with its log probability behind the logits of its row, and with so many of the likeliest ones'."""
    found = []
    for first in range(0, len(tokens), BLOCK_ROWS):
        own = tokens[first : first + BLOCK_ROWS]
        logprobs_NV = logits_NV[first : first + len(own)].to("cpu").float().log_softmax(-1)
        values, ids = (part.tolist() for part in logprobs_NV.topk(min(most, logprobs_NV.shape[1])))
        for row, token in enumerate(own):
            top = tuple(zip(ids[row], values[row], strict=True))
            found.append(Token(token, float(logprobs_NV[row, token]), top))
    return tuple(found)
