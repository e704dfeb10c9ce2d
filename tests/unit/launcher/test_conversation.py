"""Turns of a conversation through a chat template."""

from pathlib import Path

import pytest

from megakv.launcher.chat_input import CHAT_FILE, SavedChat
from megakv.launcher.conversation import Turns
from tests.distributed.models import CHAT_TEMPLATE, word_tokenizer

# As models that reason are given earlier answers.
FORGETFUL = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('ba')[-1] | trim")


@pytest.mark.parametrize(
    ("template", "answer", "kept"),
    [(CHAT_TEMPLATE, " aa ba cc", True), (FORGETFUL, " aa cc ", True), (FORGETFUL, "aa ba cc", False)],
)
def test_answers_that_a_template_changes_are_known(template: str, answer: str, kept: bool) -> None:
    tokenizer = word_tokenizer(chat=True)
    tokenizer.chat_template = template
    assert Turns(tokenizer, chat=True).keeps(answer) is kept
    assert Turns(tokenizer, chat=False).keeps(answer)


def test_a_saved_chat_of_any_depth_is_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / CHAT_FILE).write_text("[" * 100_000)
    with pytest.raises(ValueError, match="chat.json is broken: it describes no chat"):
        SavedChat.read(str(tmp_path))
