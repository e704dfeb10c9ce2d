"""Answers of a form behind reasoning that a chat template has begun: the form holds when the thoughts have ended."""

from __future__ import annotations

import json
from collections.abc import Callable

from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText

from megakv.serving.form import Form
from megakv.serving.http.parts import Part, Parts

BLANKS = "\n\n"
"""Line ends that may follow thoughts."""


def form_behind(form: Form, end: str, tokenizer: PreTrainedTokenizerBase, words: LLTokenizer) -> Form:
    """The form of any thoughts, their end, and an answer of a form."""
    grammar = form.grammar
    first, *rest = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    number = tokenizer.convert_tokens_to_ids(end)
    special = number is not None and number in tokenizer.added_tokens_decoder
    if special and tokenizer.added_tokens_decoder[number].special:
        # It is a token of its own kind, and no text.
        rules = [f"start: thoughts <[{number}]> blanks @answer", "thoughts: /(.|\\n)*/"]
    else:
        rules = ["start: thoughts blanks @answer", f"thoughts[suffix={json.dumps(end)}]: /(.|\\n)*/"]
    rules.append(f"blanks: /\\n{{0,{len(BLANKS)}}}/")
    grammars = [{"lark_grammar": "\n".join(rules)}, {**first, "name": "answer"}, *rest]
    return Form.of(json.dumps({"grammars": grammars}), words)


class ThoughtParts:
    """Reasoning up to its end, then the parts of an answer of a form."""

    def __init__(self, end: str, make: Callable[[], Parts]):
        self._end, self._inner = end, make()
        self._held, self._thinks, self._begun = "", True, False

    def add(self, text: str, *, last: bool) -> list[Part]:
        self._held += text
        found: list[Part] = []
        if self._thinks:
            at = self._held.find(self._end)
            self._thinks = at < 0
            # What may be the beginning of the end waits.
            keep = 0 if last else len(self._end) - 1
            thought = self._held[: max(0, len(self._held) - keep) if at < 0 else at]
            self._held = self._held[len(thought) + (0 if at < 0 else len(self._end)) :]
            if thought:
                found.append(ReasoningText(thought))
        if self._thinks:
            return [*found, *self._inner.add("", last=True)] if last else found
        answer, self._held = self._held, ""
        if not self._begun:
            # Line ends before the answer are of the thoughts.
            answer = answer.lstrip(BLANKS)
            self._begun = answer != ""
        return [*found, *self._inner.add(answer, last=last)] if answer or last else found
