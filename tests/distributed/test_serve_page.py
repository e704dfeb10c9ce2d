"""The page in a real browser: a document is read, asked about, streamed and found kept; without a key, nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.distributed.browser import NAMES, Browser, find_browser
from tests.distributed.models import prose, save_model
from tests.distributed.serving import Server

KEY = "the-key-of-this-test-1"
DOCUMENT = 300


@pytest.fixture
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is on the PATH (Debian: apt install chromium)")
    with Browser(program) as browser:
        yield browser


def fill(browser: Browser, name: str, text: str) -> None:
    script = f"const e = document.getElementById({json.dumps(name)}); e.value = {json.dumps(text)}"
    browser.run(f"(() => {{ {script}; for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind)) }})()")


def turns(count: int) -> str:
    """Whether so many questions have been answered to their ends."""
    return f"document.querySelectorAll('.turn').length === {count} && !document.getElementById('ask').disabled"


def test_a_document_is_read_once_and_asked_about(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    model = save_model(tmp_path / "model", chat=True)
    words = ["--cp", 2, "--api-key-file", keys, "--chunk-tokens", 32, "--kv-tokens", 20_000]
    with Server(tmp_path / "server", model, *words) as server:
        browser.open(server.url)
        browser.wait_for("document.getElementById('model')?.textContent.includes('wants an API key')")
        assert browser.run("!document.getElementById('keyrow').hidden")
        fill(browser, "key", KEY)
        browser.wait_for("document.getElementById('model').textContent.startsWith('tiny, up to 512 tokens')")
        fill(browser, "document", prose(DOCUMENT))
        assert browser.run("document.getElementById('size').textContent") == f"{3 * DOCUMENT - 1} characters"
        fill(browser, "question", "<b>aa</b> bb")
        fill(browser, "most", "20")
        browser.run(
            "window.seen = []; new MutationObserver(() => seen.push(progress.textContent))"
            ".observe(progress, {childList: true, characterData: true, subtree: true})"
        )
        browser.run("document.getElementById('ask').click()")
        browser.wait_for(turns(1))
        text = browser.run("document.querySelector('.turn').innerText")
        assert "<b>aa</b> bb" in text and "first word after" in text and "0 of them cached" in text, text
        generated = re.search(r"(\d+) generated", text)
        words = browser.run("document.querySelector('.answer').textContent.split(' ').filter(Boolean).length")
        # A drawn document may end an answer sooner, by a token that is not shown.
        assert generated is not None and (words, int(generated[1])) in [(20, 20), *((n - 1, n) for n in range(1, 21))]
        status = httpx.get(f"{server.url}/status", headers={"authorization": f"Bearer {KEY}"}).json()
        assert status["new_tokens"] == int(generated[1]), text
        seen = browser.run("seen.filter((text) => text.includes('tokens read'))")
        assert seen and any("to go" in each for each in seen), seen
        shares = browser.run("document.getElementById('shares').textContent")
        held = re.fullmatch(r"Context-parallel rank 0 has (\d+), rank 1 has (\d+)", shares)
        assert held is not None and abs(int(held[1]) - int(held[2])) <= 2, shares
        fill(browser, "question", "cc dd")
        browser.run("document.getElementById('ask').click()")
        browser.wait_for(turns(2))
        text = browser.run("document.querySelectorAll('.turn')[1].innerText")
        cached = int(text.partition(" of them cached")[0].rpartition(" ")[2])
        assert cached >= DOCUMENT, text
        browser.wait_for("document.querySelectorAll('#documents td').length >= 5")
        browser.wait_for("document.querySelectorAll('#ranks td').length === 4")
        assert "tokens kept" in browser.run("document.getElementById('load').textContent")
        # A long answer can be stopped.
        browser.run("document.getElementById('anew').click()")
        assert browser.run("document.querySelectorAll('.turn').length") == 0
        fill(browser, "document", "")
        fill(browser, "question", "ee ff")
        fill(browser, "most", "400")
        browser.run("document.getElementById('ask').click()")
        browser.wait_for("document.querySelector('.answer')?.textContent.length > 0")
        browser.run("document.getElementById('stop').click()")
        browser.wait_for("document.querySelector('.error')?.textContent.startsWith('Stopped')")
        # That it wanted a key is in the console, too.
        assert not [error for error in browser.errors if "401" not in error], browser.errors
        assert server.end() == 0
