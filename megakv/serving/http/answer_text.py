"""An answer as text with the tokens that it is of: up to a stop, which is looked for in its content alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megakv.serving.http.parts import Contents, Detokenizer, StopStrings
from megakv.serving.request import Token


class AnswerText:
    """Text that is sure, and its tokens, token by token.

    Without `contents` all of it is content. Tokens are given out with their text, those of content alone: none of a
    stop or an end, of reasoning and marks.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], contents: Contents | None = None, *, shown: bool = False
    ):
        """Where stops are `shown`, they are the end of the text."""
        self._detokenizer, self._stops, self._contents = detokenizer, StopStrings(stops, shown=shown), contents
        self._held = ""
        self._given = 0  # Letters that were given out.
        self._read = 0  # Letters that there are.
        self._searched = 0  # Up to where content was looked at.
        self._waiting: deque[tuple[int, Token]] = deque()  # Tokens, with where their text begins.
        self._spans: deque[tuple[int, int]] = deque()  # Content of which tokens may wait.
        self.found: str | None = None
        """The stop that has ended it."""

    def add(self, token: Token, *, free: bool = False) -> tuple[str, list[Token]]:
        """What there is more by a token that is text; in that of a `free` one there is no stop."""
        self._waiting.append((self._read, token))
        return self._more(self._detokenizer.add(token.id), last=False, free=free)

    def end(self) -> tuple[str, list[Token]]:
        """What was not sure, when no more tokens come."""
        return self._more(self._detokenizer.end(), last=True)

    def stop(self, found: str) -> tuple[str, list[Token]]:
        """As `end`, by a token that is a stop."""
        rest = self.end()
        self.found = self.found or found
        return rest

    @property
    def stopped(self) -> bool:
        """Whether a stop has ended it."""
        return self.found is not None

    def _more(self, text: str, *, last: bool, free: bool = False) -> tuple[str, list[Token]]:
        if self.stopped:
            return "", []
        at = self._read
        self._held += text
        self._read += len(text)
        spans = [(at, self._read)] if self._contents is None else self._contents.add(text, last=last)
        end = self._sure(spans, last=last, free=free)
        new, self._held = self._held[: end - self._given], self._held[end - self._given :]
        self._given = end
        return new, self._tokens(last=last or self.stopped)

    def _sure(self, spans: list[tuple[int, int]], *, last: bool, free: bool) -> int:
        """Where ends what can be given out."""
        for begin, end in spans:
            self._spans.append((begin, end))
            if free or begin != self._searched:
                # A stop is not one across what lies between.
                self._stops.end()
            if free:
                self._searched = end
                continue
            first = begin - self._stops.held
            shown = self._stops.add(self._held[begin - self._given : end - self._given])
            self._searched = end
            if self._stops.found is not None:
                self.found = self._stops.found
                return first + len(shown)
        if last:
            return self._read
        known = self._read if self._contents is None else self._contents.sure
        return max(self._given, min(known, self._searched - self._stops.held) if self._stops.held else known)

    def _tokens(self, *, last: bool) -> list[Token]:
        """Of content, as far as it was given out."""
        found = []
        while self._waiting:
            begin = self._waiting[0][0]
            # Its text ends where the next one's begins; of a part of a character there is none yet.
            end = max(begin + 1, self._waiting[1][0] if len(self._waiting) > 1 else self._read)
            if begin >= self._given or (end > self._given and not last):
                break
            _, token = self._waiting.popleft()
            end = min(end, self._given)
            while self._spans and self._spans[0][1] <= begin:
                self._spans.popleft()
            if any(a < end and begin < b for a, b in self._spans):
                found.append(token)
        return found
