"""How the page looks, in a real browser and windows of several widths."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megakv.serving.http.settings import ApiKeys, HttpSettings
from tests.distributed.browser import NAMES, Browser, find_browser
from tests.distributed.models import prose
from tests.unit.serving.conftest import NAME, Served, running

WIDTHS = [390, 768, 1280, 1600]
WORD = r"^\w{1,35}[.,:;]?$"
"""Words that nothing may break; longer ones must be, and signs, pictures and scripts have rules of their own."""
FAULTS = f"""(() => {{
  const found = [], width = document.documentElement.clientWidth;
  for (const each of document.querySelectorAll("[hidden]"))
    if (each.getClientRects().length) found.push("shown though hidden: " + (each.id || each.tagName));
  for (const each of document.querySelectorAll("body *"))
    if (each.getBoundingClientRect().right > width + 1) found.push("beyond the edge: " + (each.id || each.outerHTML));
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let text = texts.nextNode(); text; text = texts.nextNode())
    for (const word of text.data.matchAll(/\\S+/g)) {{
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = new Set(Array.from(range.getClientRects(), (each) => Math.round(each.top)));
      if (tops.size > 1 && /{WORD}/.test(word[0])) found.push("broken: " + word[0]);
    }}
  return found;
}})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is on the PATH (Debian: apt install chromium)")
    with Browser(program) as browser:
        yield browser


def check(browser: Browser) -> None:
    for width in WIDTHS:
        browser.size(width)
        assert browser.run(FAULTS) == [], width
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_nothing_hidden_shows_and_nothing_breaks(browser: Browser, bytes_served: Served) -> None:
    completions = bytes_served.client().completions
    for text in (prose(100), "Donaudampfschifffahrtsgesellschaft " * 3, "x" * 300, "aa http://nowhere/" + "y" * 200):
        completions.create(model=NAME, prompt=text, max_tokens=2)
    browser.open(bytes_served.url)
    browser.wait_for("document.querySelectorAll('#documents td').length >= 10")
    assert not browser.run("document.getElementById('keyrow').getClientRects().length")
    check(browser)
    # While an answer comes, and behind it.
    values = {"question": f"{prose(30)} {'z' * 200}", "most": "100"}
    for name, text in values.items():
        browser.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(text)}")
    browser.run("document.getElementById('ask').click()")
    check(browser)
    browser.wait_for("document.querySelectorAll('.turn').length === 1 && !document.getElementById('ask').disabled")
    check(browser)
    assert not browser.errors


def test_a_key_is_asked_for_where_there_are_keys(browser: Browser, served: Served, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key-of-this-test\n")
    with running((served.loop, served.model), HttpSettings(NAME, port=0, keys=ApiKeys.read(str(file)))) as url:
        browser.open(url)
        browser.wait_for("document.getElementById('model')?.textContent.includes('wants an API key')")
        assert browser.run("document.getElementById('keyrow').getClientRects().length")
        check(browser)
