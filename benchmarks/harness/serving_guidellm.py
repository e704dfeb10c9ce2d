"""What guidellm, a client that others measure servers with, says of MegaKV's and of vLLM's: of the same requests."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from megakv.base.errors import MegaKVError

from .launch import Rows, Summary
from .publish import show
from .rivals import environment_of
from .serving_server import Server, VllmServer, megakv_server

PROMPT = 512
LEAST_REQUESTS = 4
PATIENCE_S = 900.0


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each server and number of streams."""
    python, rows = environment_of("guidellm"), []
    for name in ("megakv", "vllm"):
        with megakv_server(arguments) if name == "megakv" else VllmServer(arguments) as server:
            # Of other prompts: both servers keep what they have read.
            _run(python, server, arguments, 1, seed=arguments.seed)
            for streams in tqdm(arguments.concurrent, desc=f"guidellm, {name}"):
                found = _run(python, server, arguments, streams, seed=arguments.seed + streams)
                rows.append({"server": name, **found})
    return rows


def _run(python: Path, server: Server, arguments: argparse.Namespace, streams: int, *, seed: int) -> dict[str, Any]:
    requests = max(streams, LEAST_REQUESTS)
    with tempfile.TemporaryDirectory(prefix="megakv-benchmark-") as folder:
        path = Path(folder) / "report.json"
        data = f"prompt_tokens={PROMPT},output_tokens={arguments.new_tokens}"
        options = {
            "--backend": f"kind=openai_http,target={server.url}",
            "--profile": f"kind=concurrent,streams={streams}",
            "--constraint": f"kind=max_requests,count={requests}",
            "--tokenizer": f"kind=huggingface_auto,model={arguments.model}",
            "--data": f"kind=synthetic_text,{data}",
            "--seed": f"kind=static,value={seed}",
            "--output": f"kind=json,path={path}",
        }
        command = [str(python.parent / "guidellm"), "run", "--disable-console"]
        command += [word for option in options.items() for word in option]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environ, timeout=PATIENCE_S)
        if done.returncode or not path.exists():
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise MegaKVError(f"guidellm failed: {said[-500:]}")
        (found,) = json.loads(path.read_text())["benchmarks"]
    answers = found["requests"]["successful"]
    if len(answers) < requests:
        raise MegaKVError(f"{requests - len(answers)} of {requests} of guidellm's requests failed")
    return {
        "streams": streams,
        "prompt": PROMPT,
        "new_tokens": arguments.new_tokens,
        "requests": requests,
        "seconds": found["duration"],
        "tokens_per_second": sum(answer["output_tokens"] for answer in answers) / found["duration"],
        "ttft_ms": [answer["time_to_first_token_ms"] for answer in answers],
        "itl_ms": [answer["inter_token_latency_ms"] for answer in answers],
    }


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Medians of both servers, and MegaKV's over vLLM's."""
    for row in rows:
        row["ttft"], row["itl"] = 1e-3 * median(row["ttft_ms"]), 1e-3 * median(row["itl_ms"])
    names = ("tokens_per_second", "ttft", "itl")
    show(rows, "server streams prompt new_tokens tokens_per_second ttft:ms itl:ms", "By guidellm's client")
    found = {(row["server"], row["streams"]): row for row in rows}
    over = {
        str(streams): {name: found["megakv", streams][name] / found["vllm", streams][name] for name in names}
        for server, streams in found
        if server == "megakv"
    }
    return {"guidellm_over_vllm": over}, []
