"""Training examples: prose with one or several keys in it and questions asked at several places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from prose import SEPARATOR, load_prose, nearest_cut, prose_window
from task import KEY_NAMES, answer, needle, question, random_number
from transformers import PreTrainedTokenizerBase

UNKNOWN = -1
NOTHING, PROSE, NUMBER = 0, 1, 2


@dataclass(frozen=True)
class Example:
    """One training sequence.

    Attributes
    ----------
    ids : list of int
        Tokens.
    labels : list of int
        The token that should follow each of them.
    kinds : list of int
        What each label is: ``PROSE``, ``NUMBER`` (a number already said earlier in the sequence, and what ends
        an answer) or ``NOTHING``, which is left out of the loss.
    """

    ids: list[int]
    labels: list[int]
    kinds: list[int]


class ExampleBuilder:
    """Build training sequences.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The recipe's tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.prose = load_prose("train", tokenizer)
        self.end = tokenizer.eos_token_id
        self.n_break = len(tokenizer(SEPARATOR)["input_ids"])

    def build(self, n_tokens: int, rng: np.random.Generator, max_keys: int, max_questions: int) -> Example:
        """Build one sequence.

        Parameters
        ----------
        n_tokens : int
            Greatest length.
        rng : numpy.random.Generator
            Source of randomness.
        max_keys, max_questions : int
            Greatest numbers of keys and of questions; fewer when they do not fit.

        Returns
        -------
        Example
            The sequence. Its last question stands at its end, the others anywhere after their key.
        """
        # A needle takes 26 tokens, a question with its answer 21.
        n_keys = 1
        if rng.random() < 0.5:
            n_keys = int(rng.integers(1, min(max_keys, max(1, (n_tokens - 21) // 47)) + 1))
        n_questions = int(rng.integers(1, min(max_questions, max(1, (n_tokens - 26 * n_keys) // 21)) + 1))
        events = self._events(n_keys, n_questions, rng)
        room = max(0, n_tokens - 26 * n_keys - 21 * n_questions)
        start, stop = prose_window(room, rng, self.prose)
        example = Example([], [], [])
        done = start
        for place, name, number, is_question in events:
            cut = max(done, nearest_cut(start + round(place * (stop - start)), start, stop, self.prose))
            before = self.prose.ids[done:cut].tolist()
            # The stretch begins with a line break, which divides nothing at the beginning of a text.
            self._add(example, before if example.ids else before[self.n_break :], PROSE)
            done = cut
            if is_question:
                self._add_question(example, name, number, rng)
            else:
                self._add_needle(example, name, number)
        return example

    def _events(self, n_keys: int, n_questions: int, rng: np.random.Generator) -> list[tuple[float, str, str, bool]]:
        names = list(rng.permutation(KEY_NAMES[1:]))[:n_keys]
        # The key that the evaluation asks for is in most of the sequences.
        if rng.random() < 0.7:
            names[int(rng.integers(n_keys))] = KEY_NAMES[0]
        keys = [(float(rng.random()), str(name), random_number(rng), False) for name in names]
        # A conversation gives its key in the first turn and asks much later.
        if rng.random() < 0.25:
            keys[0] = (0.0, *keys[0][1:])
        keys.sort()
        asked = []
        for index in range(n_questions):
            # Half of the early questions share the end, where they can reach back over the whole text.
            place = 1.0 if index == 0 or rng.random() < 0.5 else float(rng.uniform(keys[0][0], 1.0))
            known = [key for key in keys if key[0] <= place]
            _, name, number, _ = known[int(rng.integers(len(known)))]
            asked.append((place, name, number, True))
        return sorted(keys + asked, key=lambda event: (event[0], event[3]))

    def _add(self, example: Example, ids: list[int], kind: int) -> None:
        if not ids:
            return
        # A token's label is its successor, so the label of the last token so far becomes known here.
        if example.ids and example.labels[-1] == UNKNOWN:
            example.labels[-1], example.kinds[-1] = ids[0], kind
        example.ids.extend(ids)
        example.labels.extend([*ids[1:], UNKNOWN])
        example.kinds.extend([kind] * (len(ids) - 1) + [NOTHING])

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def _add_needle(self, example: Example, name: str, number: str) -> None:
        sentence = needle(number, name)
        middle, last = sentence.index(number), sentence.rindex(number)
        self._add(example, self._encode((" " if example.ids else "") + sentence[: middle - 1]), PROSE)
        # Where the number is said first it is random: only its repetition can be learned.
        self._add(example, self._encode(sentence[middle - 1 : last - 1]), NOTHING)
        self._add(example, self._encode(sentence[last - 1 : last + len(number)]), NUMBER)
        self._add(example, self._encode(sentence[last + len(number) :]), PROSE)

    def _add_question(self, example: Example, name: str, number: str, rng: np.random.Generator) -> None:
        self._add(example, self._encode((SEPARATOR if example.ids else "") + question(name)), NOTHING)
        self._add(example, self._encode(answer(number)), NUMBER)
        example.labels[-1], example.kinds[-1] = self.end, NUMBER
        # Engines differ in whether the end-of-text token stays in the conversation's cache.
        if rng.random() < 0.5:
            example.ids.append(self.end)
            example.labels.append(UNKNOWN)
            example.kinds.append(NOTHING)
