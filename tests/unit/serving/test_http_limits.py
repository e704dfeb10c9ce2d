"""Strangers who send too much, too slowly, without a key, or read nothing."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from megakv.serving.http.call import ServedModel
from megakv.serving.http.settings import ApiKeys, HttpSettings, listening_socket
from megakv.serving.loop import ServingLoop
from megakv.serving.request import Request
from tests.unit.serving.conftest import MOST_S, NAME, check_error, running, wait_for

KEYS = ["a-key-of-one-user-1", "a-key-of-another-2"]
BODY_BYTES, CONNECTIONS, STALL_S = 4096, 8, 1.0
CHAT = "/v1/chat/completions"
BODY = {"model": NAME, "messages": [{"role": "user", "content": "aa"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> HttpSettings:
    """Narrow limits, but of time: on a busy machine it passes between any two steps of a test."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of the team\n" + "\n".join(KEYS) + "\n")
    limits = {"max_body_bytes": BODY_BYTES, "max_connections": CONNECTIONS, "stall_s": MOST_S}
    return HttpSettings(NAME, port=0, keys=ApiKeys.read(str(file)), **limits)


@pytest.fixture(scope="module")
def url(loop: tuple[ServingLoop, ServedModel], settings: HttpSettings) -> Iterator[str]:
    """A server with narrow limits."""
    with running(loop, settings) as url:
        yield url


def key(number: int = 0) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[number]}"}


def connect(url: str, *, receive: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    made.settimeout(MOST_S)
    made.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return made


def head(*lines: str) -> bytes:
    given = [
        f"POST {CHAT} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"authorization: Bearer {KEYS[0]}",
    ]
    return "\r\n".join([*given, *lines, "", ""]).encode()


def read(connection: socket.socket) -> httpx.Response:
    """An answer to its end; the server closes."""
    content = b""
    while more := connection.recv(1 << 16):
        content += more
    lines, _, body = content.partition(b"\r\n\r\n")
    first, *fields = lines.decode().split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields)
    if headers.get("transfer-encoding") == "chunked":
        body = body.partition(b"\r\n")[2].rpartition(b"\r\n0\r\n")[0]
        headers.pop("transfer-encoding")
    return httpx.Response(int(first.split()[1]), headers=headers, content=body)


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", "Bearer é"]
)
def test_without_a_key_of_the_file_nothing_is_answered(given: str | None, url: str) -> None:
    headers = {} if given is None else {"authorization": given.encode()}
    for path in ("/v1/models", "/metrics", "/status", "/v1/responses/x", "/nothing"):
        assert check_error(httpx.get(url + path, headers=headers), 401)["code"] == "invalid_api_key"
    answer = httpx.post(url + CHAT, json=BODY, headers=headers)
    check_error(answer, 401)
    assert answer.headers["www-authenticate"] == "Bearer" and not any(name in answer.text for name in KEYS)
    # A monitor needs none, nor does whoever opens the page to type one.
    assert httpx.get(f"{url}/health", headers=headers).status_code == httpx.get(url, headers=headers).status_code == 200


@pytest.mark.parametrize("number", [0, 1])
def test_any_key_of_the_file_opens(number: int, url: str) -> None:
    assert httpx.post(url + CHAT, json=BODY, headers=key(number), timeout=MOST_S).status_code == 200


def test_responses_are_those_of_a_key(url: str) -> None:
    body = {"model": NAME, "input": "aa", "max_output_tokens": 2}
    name = httpx.post(f"{url}/v1/responses", json=body, headers=key(0), timeout=MOST_S).json()["id"]
    assert httpx.get(f"{url}/v1/responses/{name}", headers=key(0)).json()["id"] == name
    check_error(httpx.get(f"{url}/v1/responses/{name}", headers=key(1)), 404)
    follow = {**body, "previous_response_id": name}
    check_error(httpx.post(f"{url}/v1/responses", json=follow, headers=key(1)), 404)
    check_error(httpx.delete(f"{url}/v1/responses/{name}", headers=key(1)), 404)


def test_turns_are_those_of_keys_whatever_users_they_name(
    url: str, loop: tuple[ServingLoop, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first key's too; nobody is taken for another key, for a host, or for a user of another key."""
    taken, submit = list[Request](), loop[0].submit
    monkeypatch.setattr(loop[0], "submit", lambda request: (taken.append(request), submit(request)))
    for number in range(2):
        for user in (None, "", "key 1", "1", "127.0.0.1", "host 127.0.0.1"):
            named = {} if user is None else {"user": user}
            assert (
                httpx.post(url + CHAT, json={**BODY, **named}, headers=key(number), timeout=MOST_S).status_code == 200
            )
    assert [request.key for request in taken] == ["0"] * 6 + ["1"] * 6
    assert len({request.user for request in taken[:6]}) == len({request.user for request in taken[6:]}) == 6


def test_a_large_body_is_refused_before_it_is_sent(url: str) -> None:
    with closing(connect(url)) as connection:
        connection.sendall(head("content-length: 10000000000", "connection: close"))
        check_error(read(connection), 413)


def test_a_body_without_a_length_is_read_as_far_as_the_limit(url: str) -> None:
    with closing(connect(url)) as connection:
        connection.sendall(head("transfer-encoding: chunked", "connection: close"))
        part = b"400\r\n" + b" " * 1024 + b"\r\n"
        connection.sendall(part * (BODY_BYTES // 1024 + 1))
        check_error(read(connection), 413)


def test_bodies_of_all_requests_are_bounded_together(
    loop: tuple[ServingLoop, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakv.serving.http.guard.MOST_BODIES", 2)
    file_less = HttpSettings(NAME, port=0, max_body_bytes=BODY_BYTES, stall_s=MOST_S)
    with running(loop, file_less) as url:
        begun = head(f"content-length: {BODY_BYTES}") + b" " * (BODY_BYTES - 1)
        with closing(connect(url)) as first, closing(connect(url)) as second:
            first.sendall(begun)
            second.sendall(begun)
            wait_for(lambda: httpx.post(url + CHAT, json=BODY, timeout=MOST_S).status_code == 503)
        wait_for(lambda: httpx.post(url + CHAT, json=BODY, timeout=MOST_S).status_code == 200)


def test_long_headers(url: str) -> None:
    for size, status in ((10_000, 431), (200_000, 400)):
        with closing(connect(url)) as connection:
            try:
                connection.sendall(head(f"x-long: {'a' * size}", "content-length: 0", "connection: close"))
            except ConnectionError:
                pass
            check_error(read(connection), status)
    check_error(httpx.get(f"{url}/health?{'a' * 10_000}"), 431)


@pytest.mark.parametrize(
    "content",
    [b"\x16\x03\x01\x02\x00" * 20, b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nhost\r\n\r\n", b"\r\n" * 99 + b"x y z\r\n\r\n"],
)
def test_what_is_no_http(content: bytes, url: str) -> None:
    with closing(connect(url)) as connection:
        connection.sendall(content)
        check_error(read(connection), 400)


def test_who_sends_nothing_more_is_left(loop: tuple[ServingLoop, ServedModel], settings: HttpSettings) -> None:
    with running(loop, replace(settings, stall_s=STALL_S)) as url:
        for sent in (b"", b"POST /v1", head("content-length: 100"), head("content-length: 100") + b'{"model"'):
            with closing(connect(url)) as connection:
                connection.sendall(sent)
                check_error(read(connection), 408)


@pytest.mark.parametrize("order", [1, -1])
def test_two_lengths_of_a_body_are_refused_and_what_follows_is_not_read(order: int, url: str) -> None:
    """A proxy may go by the other one: what is a body there would be a request here."""
    hidden = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with closing(connect(url)) as connection:
        lengths = [f"content-length: {5 + len(hidden)}", "transfer-encoding: chunked"][::order]
        connection.sendall(head(*lengths) + b"0\r\n\r\n" + hidden)
        answer = read(connection)
    assert check_error(answer, 400)["code"] == "invalid_http" and answer.headers["connection"] == "close"


LISTENING = """
import resource, sys
from megakv.serving.http.settings import listening_socket
from megakv.serving.http.settings import HttpSettings
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
for connections in (40, 500, 5000):
    try:
        listening_socket(HttpSettings("model", port=0, max_connections=connections)).close()
        print(resource.getrlimit(resource.RLIMIT_NOFILE))
    except ValueError as error:
        print(error)
"""


def test_connections_and_the_limit_of_open_files() -> None:
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=MOST_S, check=True)
    few, more, most = done.stdout.splitlines()
    assert few == "(300, 1000)" and more == "(756, 1000)"
    assert most.startswith("--max-connections 5000: this process may have 1000 files open") and "up to 744" in most


def test_connections_are_bounded(url: str) -> None:
    held = [connect(url) for _ in range(CONNECTIONS)]
    try:
        # The last ones may not have been taken by the server yet.
        wait_for(lambda: closing_status(url) == 503)
    finally:
        for each in held:
            each.close()
    wait_for(lambda: closing_status(url) == 200)


def closing_status(url: str) -> int:
    with closing(connect(url)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = read(connection)
    if answer.status_code != 200:
        check_error(answer, 503)
    return answer.status_code


def test_only_local_names_reach_a_local_server(url: str) -> None:
    """Else a page of another site could make its own name mean this machine."""
    for name in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil"):
        check_error(httpx.get(f"{url}/health", headers={"host": name}), 403)
    for name in ("localhost", "localhost:80", "127.0.0.1:9", "[::1]:80"):
        assert httpx.get(f"{url}/health", headers={"host": name}).status_code == 200


def test_who_reads_nothing_is_left_and_nobody_waits_for_him(
    loop: tuple[ServingLoop, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakv.serving.http.settings.SEND_BYTES", 4096)
    before = loop[0].stats()
    # It takes longer than the server waits, however fast the machine is.
    options = {"max_tokens": 480, "n": 8, "stream": True, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    body = json.dumps({**BODY, **options}).encode()
    impatient = running(loop, HttpSettings(NAME, port=0, stall_s=STALL_S / 5))
    with running(loop, HttpSettings(NAME, port=0)) as patient, closing(connect(impatient.url, receive=4096)) as slow:
        # The request is there before a server that waits so shortly.
        slow.sendall(head(f"content-length: {len(body)}") + body)
        with impatient:
            wait_for(lambda: loop[0].stats().running)
            # Others are answered meanwhile.
            assert httpx.post(patient + CHAT, json=BODY, timeout=MOST_S).status_code == 200
            wait_for(lambda: loop[0].stats().cancelled > before.cancelled)
            wait_for(lambda: not loop[0].stats().running)
        assert httpx.post(patient + CHAT, json=BODY, timeout=MOST_S).status_code == 200


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has 0 keys"),
        ("short\n", "key 1 of it"),
        ("# none\n\n", "has 0 keys"),
        ("with a space in it\n", "key 1 of it"),
    ],
)
def test_key_files_are_checked(content: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ValueError, match=problem):
        ApiKeys.read(str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        ApiKeys.read(str(tmp_path / "none"))


def test_others_are_let_in_with_a_key_only() -> None:
    for host in ("0.0.0.0", "192.168.1.2", "::", "some.host"):
        with pytest.raises(ValueError, match="without --api-key-file"):
            HttpSettings(NAME, host=host)
    for host in ("127.0.0.1", "localhost", "::1"):
        HttpSettings(NAME, host=host)


@pytest.mark.parametrize(
    ("host", "advice"), [("x..y", "an address"), ("nowhere.invalid", "an address"), ("127.0.0.1", "another port")]
)
def test_where_it_cannot_listen_is_named(host: str, advice: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = HttpSettings("model", host=host, port=port, keys=ApiKeys((bytes(32),)))
        with pytest.raises(ValueError, match=f"^--host {host} --port {port}: cannot listen there: .*; give {advice}"):
            listening_socket(settings)
