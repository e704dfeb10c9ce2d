"""Log probabilities of tokens, as OpenAI's types hold them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megakv.serving.request import Token

LEAST = -9999.0
"""For what cannot be: JSON has no infinity."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[Token]) -> list[ChatCompletionTokenLogprob]:
    """For ``/v1/chat/completions``."""
    found = []
    for token in tokens:
        text, content = _text(tokenizer, token.id)
        top = []
        for other, logprob in token.top:
            name, raw = _text(tokenizer, other)
            top.append(TopLogprob(token=name, bytes=raw, logprob=_finite(logprob)))
        found.append(
            ChatCompletionTokenLogprob(token=text, bytes=content, logprob=_finite(token.logprob), top_logprobs=top)
        )
    return found


def completion_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[Token], offset: int) -> Logprobs:
    """For ``/v1/completions``; `offset` is where in the answer's text the first token begins."""
    values = Logprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    assert values.text_offset is not None and values.token_logprobs is not None
    assert values.tokens is not None and values.top_logprobs is not None
    for token in tokens:
        text, _ = _text(tokenizer, token.id)
        values.text_offset.append(offset)
        values.token_logprobs.append(_finite(token.logprob))
        values.tokens.append(text)
        values.top_logprobs.append({_text(tokenizer, other)[0]: _finite(logprob) for other, logprob in token.top})
        offset += len(text)
    return values


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None or logprob < LEAST else logprob


def _text(tokenizer: PreTrainedTokenizerBase, token: int) -> tuple[str, list[int]]:
    """A token as text, and its bytes, which may be but a part of a character."""
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if "\N{REPLACEMENT CHARACTER}" in text:
        name = tokenizer.convert_ids_to_tokens(token)
        if match := BYTE.fullmatch(name):
            return text, [int(match[1], 16)]
        letters = _byte_letters()
        if all(letter in letters for letter in name):
            return text, [letters[letter] for letter in name]
    return text, list(text.encode())


@cache
def _byte_letters() -> dict[str, int]:
    """Of byte-level tokenizers, which write every byte as a letter."""
    return {letter: value for value, letter in bytes_to_unicode().items()}
