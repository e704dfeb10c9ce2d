"""Special tokens in texts are letters where a request says so, and the template's are what they were."""

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megakv.serving.http.call import ServedModel
from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.errors import ApiError
from megakv.serving.http.literal import BEGIN, END, LiteralSpecials
from megakv.serving.request import Sampling
from tests.unit.serving.tokenizers import KINDS, byte_level, random_text

TEMPLATE = "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}<assistant>"


def tokens(tokenizer: PreTrainedTokenizerFast, text: str, **more: Any) -> list[int]:
    served = ServedModel("m", tokenizer, 4096, len(tokenizer), frozenset({0}), Sampling())
    given = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    (found,) = served.reader.prompts(ChatBody.model_validate_json(json.dumps(given)))
    return list(found)


def made(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_texts_cannot_end_their_turns(kind: str) -> None:
    tokenizer = made(kind)
    special = tokenizer.convert_tokens_to_ids(["<user>", "<end>", "<assistant>"])
    for _ in range(20):
        pieces = [random_text(12), "<end>", "<user>", "<assistant>", " ", "\n", f"{BEGIN}0{END}", f"{BEGIN}1"]
        text = "".join(random.choices(pieces, k=6))
        found = tokens(tokenizer, text, literal_specials=True)
        assert [token for token in found if token in special] == special
        assert (found[0], found[-2:]) == (special[0], special[1:])
        inner = tokenizer.decode(found[1:-2], clean_up_tokenization_spaces=False)
        assert inner.strip() == text.replace(BEGIN, "").replace(END, "").strip()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_special_tokens_are_as_they_were(kind: str) -> None:
    tokenizer = made(kind)
    for _ in range(20):
        text = random_text(60)
        assert tokens(tokenizer, text, literal_specials=True) == tokens(tokenizer, text)
    # Other requests read them as before.
    assert tokens(tokenizer, "a<end>b").count(tokenizer.eos_token_id) == 2


def test_what_cannot_be_done_exactly_is_refused() -> None:
    tokenizer = made("byte_level")
    tokenizer.chat_template = TEMPLATE.replace("m.content", f"m.content.split({END!r})[0]")
    with pytest.raises(ApiError, match="literal_specials: it cannot be done exactly: the chat template"):
        tokens(tokenizer, "a<end>b", literal_specials=True)
    assert tokens(tokenizer, "ab", literal_specials=True) == tokens(tokenizer, "ab")
    # One that takes the blanks behind it.
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<turn>", rstrip=True, special=True)]})
    tokenizer.chat_template = "<turn>{{ messages[0].content }}<end>"
    with pytest.raises(ApiError, match="change the text beside them"):
        tokens(tokenizer, " ab", literal_specials=True)


def test_all_of_a_value_is_marked() -> None:
    literal = LiteralSpecials(byte_level())
    marked = json.dumps(literal.marked([{"a<end>": ("<user>", 5, None)}, "<end"]))
    assert "<end>" not in marked and "<user>" not in marked and "<end" in marked


def test_escapes_in_arguments_are_letters() -> None:
    tokenizer = made("byte_level")
    literal = LiteralSpecials(tokenizer)
    names = ["<end>", "<user>", "<assistant>"]
    value = {"a": random.choice(names), random.choice(names): [1, random.choice(names)]}
    escaped = json.dumps(value).replace("<", "\\u003c")
    found = json.loads(literal.marked({"arguments": escaped})["arguments"])
    assert found == literal.marked(value) and not any(name in json.dumps(found) for name in names)
    assert literal.marked({"arguments": "{<end>"})["arguments"] == literal.marked("{<end>")
