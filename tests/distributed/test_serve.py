"""``megakv serve`` from end to end: clients as they are, two ranks, endings of every kind, and a store that stays."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.launch import run_command
from tests.distributed.models import prose, save_model
from tests.distributed.serving import END_S, NAME, START_S, Server
from tests.patience import Patience, alive_after, status_within

# Tokens that take seconds, whatever the machine: what is done meanwhile must not come after them.
LONG = 1500
PROMPT = 150
LOSSES = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), chat=True, max_position_embeddings=4096)


def plain_answer(model: Path, text: str, count: int) -> str:
    """What plain transformers answers to a chat's first message, up to where the tokenizer ends a turn."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids
    plain = AutoModelForCausalLM.from_pretrained(model)
    given = plain.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])} - {None}
    with torch.inference_mode():
        made = plain.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=sorted(ends) or None)
    answer: str = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return answer


def ask(server: Server, text: str, count: int, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    create = server.client().chat.completions.create
    return create(model=NAME, messages=messages, max_tokens=count, temperature=0, **options)


def check_scores(server: Server, model: Path) -> None:
    """Log probabilities of a prompt are those of plain transformers, also where it was read before."""
    tokens = [random.randrange(5, 90) for _ in range(300)]
    plain = AutoModelForCausalLM.from_pretrained(model)
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    own = [float(row[token]) for row, token in zip(expected, tokens[1:], strict=True)]
    for options in ({"max_tokens": 1}, {"max_tokens": 0, "echo": True, "logprobs": 1}):
        answer = server.client().completions.create(model=NAME, prompt=tokens, **options)  # type: ignore[call-overload]
    assert answer.choices[0].logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-3)


def streamed(server: Server, text: str, into: list[Any]) -> None:
    """An answer that takes some time, and what ended it."""
    try:
        for chunk in ask(server, text, LONG, stream=True, extra_body={"ignore_eos": True}):
            into.append(chunk.choices[0].finish_reason if chunk.choices else None)
    except (openai.APIError, httpx.HTTPError) as error:
        into.append(error)


def chat_of_transformers(server: Server, *lines: str) -> str:
    """What transformers' own client prints."""
    words = [
        Path(sys.executable).parent / "transformers",
        "chat",
        NAME,
        server.url,
        "max_new_tokens=6",
        "do_sample=False",
    ]
    done = subprocess.run(
        list(map(str, words)),
        input="\n".join([*lines, "!exit", ""]),
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "200", "HF_HUB_OFFLINE": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_clients_as_they_are_and_an_orderly_end(model: Path, tmp_path: Path) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    words = [
        "--cp",
        2,
        "--dtype",
        "fp32",
        "--json",
        report,
        "--report",
        page,
        "--kv-tokens",
        20_000,
        "--wandb",
        "serving",
    ]
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    with Server(tmp_path / "server", model, *words, env=env) as server:
        text = prose(PROMPT)
        first, second = (ask(server, text, 8) for _ in range(2))
        expected = plain_answer(model, text, 8)
        assert first.choices[0].message.content == second.choices[0].message.content == expected
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
        check_scores(server, model)
        # It asks whether to go on where an answer has come to its limit.
        drawn = iter(lambda: prose(4), "")
        question = next(text for text in drawn if ask(server, text, 6).choices[0].finish_reason == "length")
        shown = chat_of_transformers(server, question, "n")
        assert plain_answer(model, question, 6) in " ".join(shown.split()), shown
        assert len(server.get("/status").json()["memory_bytes"]) == 2
        assert 'megakv_memory_bytes{rank="1"}' in server.get("/metrics").text
        parts: list[Any] = []
        reader = threading.Thread(target=streamed, args=(server, prose(5), parts))
        reader.start()
        while len(parts) < 3:
            assert reader.is_alive()
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        refused = wait_for_refusal(server)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "unavailable"
        with pytest.raises(openai.InternalServerError, match="the server is ending"):
            ask(server, "aa", 2)
        reader.join(END_S)
        # All of it came, though the server was asked to end in the midst.
        assert parts[-1] == "length" and len(parts) > LONG / 2
        assert status_within(END_S, server.process) == 0, server.stderr
        assert "Traceback" not in server.stderr and "error" not in server.stderr, server.stderr
    served = json.loads(report.read_text())["served"]
    assert served["requests"] >= 4 and served["hit_tokens"] >= PROMPT and len(served["ttft_s"]) >= 4
    assert served["running_max"] >= 1
    assert served["moments"] and served["kv_tokens"]["device"] > 0 and served["new_tokens"] > LONG
    assert "hit rate" in page.read_text() and "Served: queue" in page.read_text()
    assert f"report: {page}" in server.stdout and list(tmp_path.glob("wandb/offline-run-*"))


def drawn_calls() -> list[dict[str, Any]]:
    """Calls of completions whose answers repeat themselves: of few tokens, likeliest or drawn, with all that changes
    which token comes next.
    """
    calls: list[dict[str, Any]] = []
    for number in range(10):
        word = prose(random.randint(3, 9))
        call: dict[str, Any] = {"prompt": f"{word} {word} {word}", "max_tokens": random.randint(1, 120)}
        call |= {"temperature": random.choice([0, 0, 0.3, 1.0]), "seed": number}
        if call["temperature"]:
            # Among few tokens some come again as they were.
            call["logit_bias"] = {str(token): 30 for token in random.sample(range(5, 90), 3)}
        extra: dict[str, Any] = {"ignore_eos": random.random() < 0.5}
        if random.random() < 0.4:
            call["frequency_penalty"] = random.choice([-0.5, 0.3])
        if random.random() < 0.3:
            extra["repetition_penalty"] = 1.1
        if random.random() < 0.4:
            call["logprobs"] = 2
        if random.random() < 0.3:
            call["stop"] = [random.choice("abcde") + random.choice("abcde ")]
        calls.append({**call, "extra_body": extra})
    return calls


def completion(server: Server, call: dict[str, Any], **fields: Any) -> tuple[Any, ...]:
    """What is told of an answer, without its name and time; log probabilities last."""
    call = {**call, "extra_body": {**call["extra_body"], **fields}}
    answer = server.client().completions.create(model=NAME, **call)
    (choice,) = answer.choices
    tokens, tops = None, list[float]()
    if choice.logprobs is not None:
        tops = [value for top in choice.logprobs.top_logprobs for value in sorted(top.values())]
        tokens = choice.logprobs.tokens
    return choice.text, choice.finish_reason, answer.usage.completion_tokens, tokens, tops


def check_alike(found: Iterable[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    """They are the same answers, but for the rounding of passes."""
    for (*told, tops), (*said, others) in zip(found, expected, strict=True):
        assert told == said and tops == pytest.approx(others, abs=1e-3)


@pytest.mark.parametrize("mesh", [("--cp", 2), ("--tp", 2)])
def test_answers_are_the_same_with_prompt_lookup(model: Path, tmp_path: Path, mesh: tuple[str, int]) -> None:
    """Alone and several at a time, beside one whose client leaves."""
    calls = drawn_calls()
    with Server(tmp_path / "server", model, *mesh, "--dtype", "fp32", "--prompt-lookup", 6) as server:

        def counts() -> tuple[int, int]:
            status = server.get("/status").json()
            return status["proposed_tokens"], status["accepted_tokens"]

        expected = [completion(server, call, prompt_lookup=0) for call in calls]
        before = counts()
        patience = Patience(END_S)
        # Where the machine was busy when passes were measured, candidates are tried after some tokens.
        while counts()[1] == before[1]:
            assert not patience.over
            check_alike([completion(server, call) for call in calls], expected)
        proposed, accepted = counts()
        assert before[0] == 0 < accepted <= proposed
        parts: list[Any] = []
        leaving = server.client().completions.create(
            model=NAME, prompt="ab ab ab", max_tokens=LONG, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        with ThreadPoolExecutor(len(calls)) as pool:
            together = pool.map(partial(completion, server), calls)
            for _, chunk in zip(range(20), leaving, strict=False):
                parts.append(chunk)
            leaving.close()
            check_alike(together, expected)
        metrics = server.get("/metrics").text
        assert f"megakv_proposed_tokens_total {float(counts()[0])}" in metrics
        with pytest.raises(openai.BadRequestError, match="prompt_lookup"):
            completion(server, calls[0], prompt_lookup=-1)
        assert server.end() == 0 and "Traceback" not in server.stderr, server.stderr


def wait_for_refusal(server: Server) -> httpx.Response:
    patience = Patience(END_S)
    while (answer := server.get("/health")).status_code == 200:
        assert not patience.over
        time.sleep(0.01)
    return answer


def on_disk(store: Path, ranks: int) -> int:
    """Tokens of prefixes of which all files are there: the status counts those that are being written, too."""
    whole = [
        path for path in store.glob("*/*.json") if len(list(path.parent.glob(f"{path.stem}.*.safetensors"))) == ranks
    ]
    return sum(len(json.loads(path.read_text())["tokens"]) for path in whole)


def test_what_was_read_is_there_after_a_kill_on_another_mesh(model: Path, tmp_path: Path) -> None:
    text, store = prose(PROMPT), ["--dtype", "fp32", "--store", tmp_path / "store", "--store-gb", 1]
    with Server(tmp_path / "first", model, "--cp", 2, *store) as server:
        ask(server, text, 4)
        patience = Patience(END_S)
        while on_disk(tmp_path / "store", ranks=2) < PROMPT:
            assert not patience.over, server.get("/status").text
            time.sleep(0.1)
        for rank in server.ranks:
            rank.kill()
        assert status_within(END_S, server.process) == 1
    with Server(tmp_path / "second", model, "--cp", 1, *store) as server:
        answer = ask(server, text, 4)
        assert answer.choices[0].message.content == plain_answer(model, text, 4)
        assert answer.usage.prompt_tokens_details.cached_tokens >= PROMPT - 8
        assert server.end(signum=signal.SIGINT) == 0


@pytest.mark.parametrize("signum", [pytest.param(each, marks=pytest.mark.drawn("losses")) for each in LOSSES])
def test_a_lost_rank_is_told_to_clients_and_ends_the_server(model: Path, tmp_path: Path, signum: int) -> None:
    with Server(tmp_path / "server", model, "--cp", 2) as server:
        parts: list[Any] = []
        reader = threading.Thread(target=streamed, args=(server, prose(5), parts))
        reader.start()
        while len(parts) < 3:
            assert reader.is_alive()
            time.sleep(0.01)
        assert len(server.ranks) == 2
        server.ranks[1].send_signal(signum)
        reader.join(END_S)
        assert isinstance(parts[-1], openai.APIError) and "was lost" in str(parts[-1]), parts[-1]
        assert status_within(END_S, server.process) == 1
        assert "Traceback" not in server.stderr, server.stderr


@pytest.mark.parametrize("signum", [pytest.param(each, marks=pytest.mark.drawn("losses")) for each in LOSSES])
def test_a_rank_that_is_lost_while_nobody_asks_ends_the_server(model: Path, tmp_path: Path, signum: int) -> None:
    """Without a request that would find it out."""
    with Server(tmp_path / "server", model, "--cp", 2) as server:
        assert server.get("/health").status_code == 200
        server.ranks[1].send_signal(signum)
        assert status_within(END_S, server.process) == 1
        assert "was lost" in server.stderr and "Traceback" not in server.stderr, server.stderr


def test_a_first_rank_that_is_killed_is_told_to_clients(model: Path, tmp_path: Path) -> None:
    """By the process that speaks HTTP, which ends then."""
    with Server(tmp_path / "server", model, "--cp", 2) as server:
        parts: list[Any] = []
        reader = threading.Thread(target=streamed, args=(server, prose(5), parts))
        reader.start()
        while len(parts) < 3:
            assert reader.is_alive()
            time.sleep(0.01)
        [http] = server.first_rank.children()
        server.first_rank.kill()
        reader.join(END_S)
        assert isinstance(parts[-1], openai.APIError) and "ranks of this server have ended" in str(parts[-1]), parts[-1]
        assert status_within(END_S, server.process) == 1
        assert not alive_after(END_S, [http])


def test_when_what_speaks_http_is_killed_all_ranks_end(model: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "server", model, "--cp", 2) as server:
        [http] = server.first_rank.children()
        # A launcher asks all to end; this one ends with rank 0.
        http.terminate()
        assert server.get("/health").status_code == 200
        http.kill()
        assert status_within(END_S, server.process) == 1
        said = "megakv: error: the process that speaks HTTP has ended by signal 9\n"
        assert server.stderr.count("megakv: error") == 1 and said in server.stderr, server.stderr


@pytest.mark.drawn("ends")
def test_asked_twice_it_ends_at_once(model: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "server", model, "--cp", 2) as server:
        parts: list[Any] = []
        reader = threading.Thread(target=streamed, args=(server, prose(5), parts))
        reader.start()
        while not parts:
            assert reader.is_alive()
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        wait_for_refusal(server)
        assert server.end() == 128 + signal.SIGTERM
        reader.join(END_S)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 without --api-key-file"),
        (["--port", "70000"], "--port 70000: allowed"),
        (["--api-key-file", "none"], "--api-key-file none cannot be read"),
        (["--allow-origin", "localhost:3000"], "--allow-origin localhost:3000: allowed"),
        (["--max-gap", "0"], "max_gap_s = 0.0: allowed"),
        (["--decode-share", "1"], "decode_share = 1.0: allowed"),
        (["--max-queue", "-1"], "max_queue = -1: allowed"),
        (["--prompt-lookup", "-1"], "prompt_lookup = -1: allowed: whole numbers from 0"),
        (["--max-body-mb", "0"], "max_body_bytes = 0: allowed"),
        (["--cp", "0"], "--cp 0: allowed"),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(words: list[str], problem: str) -> None:
    done = run_command([sys.executable, "-m", "megakv", "serve", "none", *words], timeout=60)
    assert done.returncode == 1 and not done.leftovers
    assert done.stderr.startswith("megakv: error: ") and problem in done.stderr and done.stderr.count("\n") == 1


def test_a_port_that_is_taken(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [sys.executable, "-m", "megakv", "serve", str(model), "--cp", "2", "--port", str(port)]
        done = run_command(words, timeout=START_S)
    assert done.returncode == 1 and not done.leftovers
    assert f"--port {port}: cannot listen there" in done.stderr and done.stderr.count("megakv: error") == 1, done.stderr
