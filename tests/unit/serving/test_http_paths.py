"""Paths beside answers: tokens of texts, versions, methods, slashes at the end, and pages of other sites."""

import argparse
import random
from collections.abc import Iterator

import httpx
import pytest

import megakv
from megakv.launcher.commands.serve import add_arguments, http_settings
from megakv.launcher.ranks import command_line
from megakv.serving.http.settings import ApiKeys, HttpSettings
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error, running

PAGE = "http://localhost:3000"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "aa"}], "max_tokens": 2}
OPEN = ("/", "/health", "/ping", "/version", "/v1/models", "/metrics")


def test_texts_become_tokens_and_text_again(bytes_served: Served) -> None:
    tokenizer, url = bytes_served.model.tokenizer, bytes_served.url
    for _ in range(20):
        text = "".join(random.choices('ab c\né漢{}"\\', k=random.randint(1, 60)))
        made = httpx.post(f"{url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        tokens = tokenizer(text)["input_ids"]
        assert made == {
            "count": len(tokens),
            "max_model_len": bytes_served.model.context,
            "tokens": tokens,
            "token_strs": tokenizer.convert_ids_to_tokens(tokens),
        }
        assert httpx.post(f"{url}/detokenize", json={"model": NAME, "tokens": tokens}).json() == {"prompt": text}


def test_conversations_become_the_tokens_that_answers_go_on_from(served: Served) -> None:
    messages = [{"role": "user", "content": "aa ab"}, {"role": "assistant", "content": "ba"}, BODY["messages"][0]]
    made = httpx.post(f"{served.url}/tokenize", json={"messages": messages}).json()
    asked = {**BODY, "messages": messages}
    assert httpx.post(served.url + CHAT, json=asked, timeout=MOST_S).json()["usage"]["prompt_tokens"] == made["count"]
    assert made["token_strs"] is None
    plain, special = (
        httpx.post(f"{served.url}/tokenize", json={"prompt": "aa", "add_special_tokens": each}).json()["tokens"]
        for each in (False, True)
    )
    tokenizer = served.model.tokenizer
    assert plain == tokenizer("aa", add_special_tokens=False)["input_ids"] and special == tokenizer("aa")["input_ids"]


def test_what_is_no_text_and_no_token_is_named(served: Served) -> None:
    for path, body, param in [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", **BODY}, "max_tokens"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**8]}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
    ]:
        assert check_error(httpx.post(served.url + path, json=body), 400)["param"] == param


def test_versions_and_heads(served: Served) -> None:
    assert httpx.get(f"{served.url}/version").json() == {"version": megakv.__version__}
    assert httpx.get(f"{served.url}/ping").json() == {"status": "ok"}
    with httpx.Client(base_url=served.url) as client:
        for path in OPEN:
            head, got = client.head(path), client.get(path)
            assert head.status_code == got.status_code == 200 and not head.content
            assert head.headers["content-type"] == got.headers["content-type"]
    assert httpx.head(f"{served.url}/nothing").status_code == 404


def test_a_slash_at_the_end_changes_nothing(served: Served) -> None:
    for path in ("/health", "/v1/models", f"/v1/models/{NAME}"):
        assert httpx.get(f"{served.url}{path}/").json() == httpx.get(served.url + path).json()
    assert httpx.post(f"{served.url}{CHAT}/", json=BODY, timeout=MOST_S).status_code == 200
    assert httpx.get(f"{served.url}//").status_code == 200


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-odd"}


def test_without_origins_no_page_of_another_site_is_told_anything(served: Served) -> None:
    preflight = httpx.options(served.url + CHAT, headers={"origin": PAGE, **PREFLIGHT})
    assert check_error(preflight, 405)["code"] == "method_not_allowed" and preflight.headers["allow"] == "POST"
    answer = httpx.get(f"{served.url}/health", headers={"origin": PAGE})
    assert not [name for each in (preflight, answer) for name in each.headers if name.startswith("access-control")]


@pytest.fixture(scope="module")
def with_pages(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("a-key-of-one-user-1")
    settings = HttpSettings(NAME, port=0, keys=ApiKeys.read(str(file)), origins=(PAGE, "app://x"))
    with running((served.loop, served.model), settings) as url:
        yield url


def test_pages_of_allowed_origins_may_ask(with_pages: str) -> None:
    for origin in (PAGE, "app://x"):
        preflight = httpx.options(with_pages + CHAT, headers={"origin": origin, **PREFLIGHT})
        allowed = {name: value for name, value in preflight.headers.items() if name.startswith("access-control-allow")}
        assert preflight.status_code == 204 and allowed["access-control-allow-origin"] == origin
        assert "POST" in allowed["access-control-allow-methods"] and "x-odd" not in str(allowed)
        assert "authorization" in allowed["access-control-allow-headers"] and preflight.headers["vary"] == "origin"
        # Errors too: a page is to read what was wrong.
        refused = httpx.post(with_pages + CHAT, json=BODY, headers={"origin": origin})
        check_error(refused, 401)
        key = {"authorization": "Bearer a-key-of-one-user-1"}
        answer = httpx.post(with_pages + CHAT, json=BODY, headers={"origin": origin, **key}, timeout=MOST_S)
        assert answer.status_code == 200
        assert {each.headers["access-control-allow-origin"] for each in (answer, refused)} == {origin}


def test_pages_of_other_origins_may_not(with_pages: str) -> None:
    for origin in ("http://localhost:3001", "https://localhost:3000", f"{PAGE}.evil", "null", ""):
        preflight = httpx.options(with_pages + CHAT, headers={"origin": origin, **PREFLIGHT})
        answer = httpx.get(f"{with_pages}/health", headers={"origin": origin})
        assert preflight.status_code == 403 and answer.status_code == 200
        assert not [n for each in (preflight, answer) for n in each.headers if n.startswith("access-control")]


def test_origins_are_checked() -> None:
    for origin in ("localhost:3000", "http://a/path", "http://", "", "http://a\r\nx: y"):
        with pytest.raises(ValueError, match="--allow-origin"):
            HttpSettings(NAME, origins=(origin,))
    with pytest.raises(ValueError, match="without --api-key-file"):
        HttpSettings(NAME, origins=("*",))
    HttpSettings(NAME, origins=("*",), keys=ApiKeys((bytes(32),)))


def test_ranks_are_given_what_the_command_was() -> None:
    """Settings go from the command to its ranks as words."""
    for words in ([], ["--strict-model"], ["--allow-origin", PAGE, "app://x", "--strict-model"]):
        first, second = argparse.ArgumentParser(), argparse.ArgumentParser()
        add_arguments(first)
        add_arguments(second, ranks=False)
        settings = http_settings(second.parse_args(command_line(first.parse_args(["model", *words]))))
        assert settings.strict_model == ("--strict-model" in words)
        assert settings.origins == ((PAGE, "app://x") if "--allow-origin" in words else ())
