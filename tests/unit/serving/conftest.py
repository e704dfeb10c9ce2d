"""A server over a real loop and a real engine, of one rank, in this process."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import megakv
from megakv.serving.api import ApiLink
from megakv.serving.http.call import ServedModel
from megakv.serving.http.process import connect
from megakv.serving.http.server import HttpServer
from megakv.serving.http.settings import HttpSettings, listening_socket
from megakv.serving.loop import ServingLoop
from megakv.serving.settings import ServingSettings
from tests.distributed.models import save_model
from tests.patience import Patience
from tests.unit.serving.tokenizers import byte_level

NAME = "tiny"
TEMPLATE = "{% for message in messages %}<user>{{ message.content }}{% endfor %}<assistant>"
MOST_S = 120.0
"""Of a call; what takes longer hangs."""


@dataclass
class Served:
    """A loop that answers, and the same model without it."""

    loop: ServingLoop
    model: ServedModel
    plain: AutoModelForCausalLM
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=MOST_S)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What the plain model answers, with the tokenizer's end of a turn beside the model's."""
        ends = {"eos_token_id": sorted(self.model.end_ids)} if self.model.end_ids else {}
        with torch.inference_mode():
            made = self.plain.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, **ends)
        return made[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), chat=True)


@pytest.fixture(scope="session")
def loop(model_folder: Path) -> Iterator[tuple[ServingLoop, ServedModel]]:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    with megakv.init_inference(str(model_folder)) as engine:
        loop = ServingLoop(engine, ServingSettings(kv_tokens=100_000))
        thread = threading.Thread(target=loop.run)
        thread.start()
        yield loop, ServedModel.of(engine.module, tokenizer, NAME)
        loop.drain()
        thread.join(MOST_S)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def served(loop: tuple[ServingLoop, ServedModel], model_folder: Path) -> Iterator[Served]:
    """Without a key."""
    plain = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    with running(loop, HttpSettings(NAME, port=0)) as url:
        yield Served(*loop, plain, url)


@pytest.fixture(scope="session")
def bytes_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose tokenizer has all bytes, as real ones do, and whose engine has a budget."""
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    folder = save_model(tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer) + 3)
    config = {"megakv": {"fairkv": {"budget": 40, "window": 8, "min_tokens": 48}}}
    with megakv.init_inference(str(folder), config) as engine:
        loop = ServingLoop(engine, ServingSettings(kv_tokens=20_000))
        thread = threading.Thread(target=loop.run)
        thread.start()
        model = ServedModel.of(engine.module, tokenizer, NAME)
        with running((loop, model), HttpSettings(NAME, port=0)) as url:
            yield Served(loop, model, engine.module, url)
        loop.drain()
        thread.join(MOST_S)


@pytest.fixture
def budget(tmp_path: Path) -> Iterator[str]:
    """The address of one whose engine has a budget."""
    folder = save_model(tmp_path / "model", chat=True)
    config = {"megakv": {"fairkv": {"budget": 40, "window": 8, "min_tokens": 48}}}
    with megakv.init_inference(str(folder), config) as engine:
        loop = ServingLoop(engine, ServingSettings(kv_tokens=100_000))
        thread = threading.Thread(target=loop.run)
        thread.start()
        served = ServedModel.of(engine.module, AutoTokenizer.from_pretrained(folder), NAME)
        with running((loop, served), HttpSettings(NAME, port=0)) as url:
            yield url
        loop.drain()
        thread.join(MOST_S)
        assert not thread.is_alive()


class running:  # noqa: N801
    """A server in a ``with``, in threads of this process; gives its address, `url`, where connections wait for it."""

    def __init__(self, loop: tuple[ServingLoop, ServedModel], settings: HttpSettings):
        self._listener = listening_socket(settings)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server, (_, self._model) = HttpServer(settings, self._listener), loop
        ours, self._theirs = socket.socketpair()
        self._link = ApiLink(loop[0], ours, self._model.form_of)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        ranks = await connect(self._theirs)
        ranks.on_end = self._server.end
        self._server.open(ranks, self._model)
        ranks.stand()
        await self._server.serve()

    def __enter__(self) -> str:
        self._thread.start()
        self._link.start()
        assert self._link.decided.wait(MOST_S) and self._link.stands
        return self.url

    def __exit__(self, *ending: object) -> None:
        self._link.stop()
        self._thread.join(MOST_S)
        assert not self._thread.is_alive()
        self._link.close()
        self._listener.close()


def wait_for(condition: Callable[[], Any]) -> None:
    patience = Patience(MOST_S)
    while not condition():
        assert not patience.over
        time.sleep(0.02)


def check_error(answer: httpx.Response, *statuses: int) -> dict[str, str]:
    """That it is one of OpenAI's error objects, and no more; returns it."""
    assert answer.status_code in statuses, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/json"
    value = answer.json()
    assert value.keys() == {"error"} and value["error"].keys() == {"message", "type", "param", "code"}
    assert value["error"]["message"] and "Traceback" not in answer.text
    return value["error"]
