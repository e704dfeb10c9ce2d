"""An answer's text from its tokens, one by one, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

MOST_TOKENS = 32
"""Tokens that are decoded together; those before them are text for good."""
CONTEXT_TOKENS = 8
"""Of them, those that remain when it gets more: a tokenizer may treat a text's first token otherwise."""
MOST_BROKEN = 3
"""Bytes of a character that has not come whole, each of which may be shown as one that is broken."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text that is sure, token by token; a character of several tokens comes when it is whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special: bool = False):
        self._tokenizer, self._special = tokenizer, special
        self._tokens: list[int] = []
        self._given = 0  # Letters of these tokens' text that were given out.
        self._whole = 0  # Of these tokens, so many end with a whole character, and some others follow.

    def add(self, token: int) -> str:
        """What the text has more by one more token."""
        before, clean = len(self._tokens), self._given == len(self._text())
        self._tokens.append(token)
        text = self._text()
        if clean and 0 < before <= MOST_TOKENS - CONTEXT_TOKENS:
            self._whole = before
        broken = len(text) - len(text.rstrip(BROKEN))
        new = self._give(text[: len(text) - min(broken, MOST_BROKEN)])
        if len(self._tokens) >= MOST_TOKENS and (not broken or len(self._tokens) >= 2 * MOST_TOKENS):
            new += self._give(text)
            # Beginning within a character, what follows would look broken.
            del self._tokens[: self._whole or -CONTEXT_TOKENS]
            self._given, self._whole = len(self._text()), 0
        return new

    def end(self) -> str:
        """What was not sure, when no more tokens come."""
        return self._give(self._text())

    def _text(self) -> str:
        text: str = self._tokenizer.decode(
            self._tokens, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )
        return text

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new


class StopStrings:
    """Finds the first of some strings in a text that comes in parts; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What can be shown of the text so far; nothing more once a stop was found."""
        if self.found is not None:
            return ""
        self._held += text
        if places := [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]:
            at, _, self.found = min(places)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        at = len(self._held) - keep
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def end(self) -> str:
        """What was held back, when no more comes."""
        shown, self._held = self._held, ""
        return shown


def _begun(text: str, stop: str) -> int:
    """Letters at the end of a text with which a stop may begin."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
