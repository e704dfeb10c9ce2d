"""A server whose ranks, or whose own process, fail: streams end with an error, and nobody is kept waiting."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

import megakv
from megakv.base.errors import MegaKVError
from megakv.serving.api import ApiProcess
from megakv.serving.http.call import ServedModel
from megakv.serving.http.settings import HttpSettings, listening_socket
from megakv.serving.loop import ServingLoop
from megakv.serving.settings import ServingSettings
from tests.unit.serving.conftest import MOST_S, NAME, check_error, running

BODY = {"model": NAME, "prompt": [5, 6], "max_tokens": 400}


@contextmanager
def failing(model_folder: Path) -> Iterator[tuple[Any, tuple[ServingLoop, ServedModel], Callable[[], BaseException]]]:
    """An engine, the loop over it, and how that ended."""
    with megakv.init_inference(str(model_folder)) as engine:
        loop, ends = ServingLoop(engine, ServingSettings(kv_tokens=10_000)), list[BaseException]()

        def run() -> None:
            try:
                loop.run()
            except BaseException as error:
                ends.append(error)

        def ended() -> BaseException:
            thread.join(MOST_S)
            return ends[0]

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield (
                engine,
                (loop, ServedModel.of(engine.module, AutoTokenizer.from_pretrained(model_folder), NAME)),
                ended,
            )
        finally:
            loop.drain()
            thread.join(MOST_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(MemoryError(), MemoryError), (OSError("gone"), OSError), (KeyboardInterrupt(), KeyboardInterrupt)]
    + [(SystemExit(0), MegaKVError), (KeyError("x"), KeyError)],
)
def test_whatever_ends_the_loop_is_told_to_clients(
    model_folder: Path, error: BaseException, raised: type[BaseException]
) -> None:
    fails = threading.Event()

    def fail(*_: Any) -> None:
        if fails.is_set():
            raise error

    with failing(model_folder) as (engine, loop, ended), running(loop, HttpSettings(NAME, port=0)) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        list(engine.module.modules())[-1].register_forward_pre_hook(fail)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=MOST_S)
        stream = client.completions.create(**BODY, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        fails.set()
        with pytest.raises(openai.APIError, match="the server failed"):
            list(stream)
        assert isinstance(ended(), raised)
        assert httpx.get(f"{url}/health").status_code == 503
        check_error(httpx.post(f"{url}/v1/completions", json=BODY, timeout=MOST_S), 503)


def test_a_process_that_speaks_http_is_part_of_the_server(model_folder: Path) -> None:
    """It says that the model is loaded, then answers; when it is killed the loop ends, for clients of others too."""
    settings = HttpSettings(NAME, port=0)
    with listening_socket(settings) as listener:
        api = ApiProcess(settings, listener)
    url = f"http://127.0.0.1:{api.address[1]}"
    try:
        loading = check_error(httpx.get(f"{url}/health", timeout=MOST_S), 503)
        assert loading["message"] == "the model is being loaded"
        with failing(model_folder) as (_, loop, ended), running(loop, settings) as other:
            api.serve(*loop)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=MOST_S)
            assert client.completions.create(**BODY).usage.completion_tokens > 0
            assert httpx.get(f"{url}/health").status_code == 200
            api.process.kill()
            assert str(ended()) == "the process that speaks HTTP has ended by signal 9"
            assert httpx.get(f"{other}/health").status_code == 503
            # Asked to drain it does not mind.
            api.drain()
    finally:
        api.close()
    api.drain()


def test_one_that_has_not_begun_to_serve_ends_at_once() -> None:
    settings = HttpSettings(NAME, port=0)
    with listening_socket(settings) as listener:
        api = ApiProcess(settings, listener)
    api.close()
    assert api.process.returncode == -signal.SIGKILL
