"""Text from tokens, one by one: whole characters, the same as from all at once, and stops wherever they fall."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from megakv.serving.http.parts import BROKEN, MOST_TOKENS, MOST_WAITING, Detokenizer, StopStrings
from tests.unit.serving.tokenizers import KINDS, random_text


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return KINDS[request.param]()


def pieces(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.end()]


def test_pieces_are_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    for length in (1, 3, 40, 400):
        tokens = tokenizer(random_text(length), add_special_tokens=False).input_ids
        found = pieces(tokenizer, tokens)
        assert "".join(found) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        # No character comes in halves.
        assert not any(BROKEN in piece for piece in found)


def test_a_text_goes_on_behind_another(tokenizer: PreTrainedTokenizerFast) -> None:
    for start in ("ab cd", f"ab {random_text(40)}", random_text(3) + "漢"):
        prompt = tokenizer(start, add_special_tokens=False).input_ids
        for answer in (" ab", "cd", f" {random_text(40)}"):
            whole = tokenizer(start + answer, add_special_tokens=False).input_ids
            if whole[: len(prompt)] != prompt:
                continue
            detokenizer = Detokenizer(tokenizer, behind=prompt)
            found = "".join([*map(detokenizer.add, whole[len(prompt) :]), detokenizer.end()])
            said = tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
            assert said + found == tokenizer.decode(whole, clean_up_tokenization_spaces=False)


def test_what_is_no_text_does_not_hold_back_what_follows(tokenizer: PreTrainedTokenizerFast) -> None:
    """Random bytes."""
    for _ in range(10):
        noise, tail = random.choices(range(3, 250), k=random.randint(1, 300)), "abc" * 10
        detokenizer = Detokenizer(tokenizer)
        for token in noise:
            detokenizer.add(token)
            assert len(detokenizer._tokens) <= MOST_TOKENS + MOST_WAITING
        tokens = tokenizer(tail, add_special_tokens=False).input_ids
        shown = "".join([*map(detokenizer.add, tokens), detokenizer.end()])
        assert shown.endswith(tail)


def test_special_tokens_are_text_only_where_asked_for() -> None:
    tokenizer = KINDS["byte_level"]()
    tokens = [tokenizer.convert_tokens_to_ids("<user>"), *tokenizer("ab").input_ids]
    assert "".join(pieces(tokenizer, tokens)) == "ab"
    detokenizer = Detokenizer(tokenizer, special=True)
    assert "".join([*map(detokenizer.add, tokens), detokenizer.end()]) == "<user>ab"


def cut(text: str) -> list[str]:
    places = sorted(random.choices(range(len(text) + 1), k=random.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def test_stops_are_found_wherever_they_are_cut() -> None:
    for _ in range(500):
        text = "".join(random.choices("ab", k=random.randint(0, 30)))
        stops = ["".join(random.choices("ab", k=random.randint(1, 5))) for _ in range(random.randint(0, 4))]
        finder = StopStrings(stops)
        shown = "".join(map(finder.add, cut(text)))
        places = [(at, -len(stop)) for stop in stops if (at := text.find(stop)) >= 0]
        if finder.found is None:
            assert not places and shown + finder.end() == text
        else:
            # A longer stop may begin earlier than one that was complete before it.
            assert any(text.startswith(finder.found, len(shown)) for _ in [0])
            assert min(text.find(finder.found), len(shown)) == len(shown) or len(shown) >= min(places)[0]


def test_what_cannot_begin_a_stop_is_not_held_back() -> None:
    finder = StopStrings(["END", "\n\n"])
    assert [finder.add(part) for part in ("some E", "N", "x\n", "y")] == ["some ", "", "ENx", "\ny"]
    assert finder.add("E") == "" and finder.end() == "E"
    assert finder.add("a\n\nb") == "a" and finder.found == "\n\n" and finder.add("more") == ""
