"""A conversation with a model: the tokens of its turns, through the model's chat template where it has one."""

from __future__ import annotations

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from megakv.engine.session import Session
from megakv.weights.folder import local_directory, read_config

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model")
ANSWER = "<<megakv-answer>>"
"""Stands for an answer in a rendered conversation; no tokenizer ever sees it."""


def read_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's directory or hub id."""
    directory = local_directory(model)
    # A folder that holds no model is not to be called one without a tokenizer.
    read_config(directory)
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # a broken tokenizer.json raises a bare Exception
        found = any(path for pattern in TOKENIZER_FILES for path in directory.glob(pattern))
        reason = " ".join(str(error).split()) if found else "there is none; copy tokenizer.json from the original model"
        raise ValueError(f"--model {model}: its tokenizer cannot be read: {reason or type(error).__name__}") from error


def template_note(model: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What a user should know, and can do, whose model has no chat template."""
    if tokenizer.chat_template is not None:
        return None
    return (
        "the model has no chat template: what you write goes in as it is, as base models want it; a template goes into "
        f"{local_directory(model) / 'chat_template.jinja'}"
    )


class Turns:
    """Makes the ``[1, T]`` tokens of a conversation's turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool):
        self._tokenizer = tokenizer
        self._chat = chat and tokenizer.chat_template is not None

    def first(self, text: str) -> Tensor:
        """The tokens that begin a conversation."""
        return self._ids(self._rendered(text)) if self._chat else self._tokenizer(text, return_tensors="pt").input_ids

    def next(self, text: str) -> Tensor:
        """The tokens behind an answer without its end of turn (`end_answer`), whatever the answer was."""
        if not self._chat:
            return self._ids(f"\n\n{text}")
        _, found, tail = self._rendered("-", ANSWER, text).rpartition(ANSWER)
        if not found:
            raise ValueError("the model's chat template leaves answers out: give --no-chat-template, or one question")
        return self._ids(tail)

    def keeps(self, answer: str) -> bool:
        """Whether the template renders an earlier answer as it was given, and as a session goes on holding it."""
        if not self._chat:
            return True
        frame = self._rendered("-", ANSWER, "-")
        return self._rendered("-", answer, "-") in [frame.replace(ANSWER, text) for text in (answer, answer.strip())]

    def _rendered(self, *contents: str) -> str:
        """What users and the model say in turn, and how an answer begins."""
        messages = [
            {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)
        ]
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever a template calls
            raise ValueError(f"the model's chat template fails: {error}: give --no-chat-template") from error

    def _ids(self, text: str) -> Tensor:
        return self._tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def end_answer(session: Session, model: PreTrainedModel) -> None:
    """Take the token that ended the last answer out of a session: the template of the next turn brings its own."""
    stops, tokens = model.generation_config.eos_token_id, session.input_ids
    stops = stops if isinstance(stops, list) else [stops]
    if tokens is not None and int(tokens[0, -1]) in stops:
        session.cut_back(tokens.shape[1] - 1)
