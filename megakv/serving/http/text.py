"""An answer's text from its tokens, one by one, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

MOST_TOKENS = 32
"""Tokens that are decoded together; those before them are text for good."""
CONTEXT_TOKENS = 4
"""Of them, those that remain when it gets more: a tokenizer may treat a text's first token otherwise."""
MOST_WAITING = 8
"""Tokens that may wait for the rest of a character, which has four bytes at most: what is longer is none."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text that is sure, token by token; a character of several tokens comes when it is whole.

    A text that goes on behind other tokens keeps the space that it begins with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special: bool = False, behind: Sequence[int] = ()):
        self._tokenizer, self._special = tokenizer, special
        self._tokens = list(behind[-CONTEXT_TOKENS:])
        before = self._text()
        while BROKEN in before:
            # Bytes of a character that begins earlier would be taken together with those of the answer.
            del self._tokens[0]
            before = self._text()
        self._given = len(before)  # Letters of these tokens' text that were given out.
        self._ends = [len(self._tokens)]  # So many of these tokens ended with a whole character.

    def add(self, token: int) -> str:
        """What the text has more by one more token."""
        self._tokens.append(token)
        text, count = self._text(), len(self._tokens)
        if text.endswith(BROKEN):
            if count - self._ends[-1] <= MOST_WAITING:
                return ""
            new = self._give(text)
            self._keep(count)
            return new
        self._ends.append(count)
        new = self._give(text)
        if count >= MOST_TOKENS:
            # Beginning within a character, what follows would look broken.
            self._keep(max(end for end in self._ends if end <= count - CONTEXT_TOKENS))
        return new

    def end(self) -> str:
        """What was not sure, when no more tokens come."""
        return self._give(self._text())

    def _text(self) -> str:
        text: str = self._tokenizer.decode(
            self._tokens, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )
        return text

    def _keep(self, first: int) -> None:
        """Go on from a later token, at which all is given out."""
        del self._tokens[:first]
        self._given = len(self._text())
        self._ends = [0, *(end - first for end in self._ends if end > first)]

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
