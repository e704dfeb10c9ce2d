"""Started on every rank: a served engine, and on rank 0 those who ask it.

Usage: serving.py OUT.json MODEL CPxTP STAGE STORE, with STAGE ``random`` (many requests, against the engine alone),
``budget`` (some of them with compressed caches), ``offload`` and ``mapping`` (with the section in the file STORE),
``store`` (a long prompt, after which the ranks kill themselves), ``restored`` (the same after a restart), ``killed``
(the last rank kills itself while all is under way), or ``raises ERROR RANK`` (that rank's next pass raises it instead).
"""

from __future__ import annotations

import builtins
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

import megakv
from megakv.base.errors import MegaKVError
from megakv.launcher.process import orderly_end, quiet_libraries
from megakv.serving import lookups
from megakv.serving.loop import ServingLoop
from megakv.serving.request import Event, Finished, Progress, Request, Sampling, Token
from megakv.serving.settings import ServingSettings

VOCABULARY = 128
BUDGET = {"budget": 40, "method": "ada_snapkv", "window": 8, "min_tokens": 48, "decode_interval": 8}
LIKELY = {7: 30.0, 20: 30.0, 90: 30.0}
"""Tokens of all answers, so that they repeat themselves."""
GREEDY = Sampling(temperature=0, logit_bias=LIKELY)
REQUESTS = 40
LONG = 300
WAIT_SECONDS = 120.0


class Client:
    """One who asks: what came, and when."""

    def __init__(self, loop: ServingLoop, name: str, prompt: list[int], new: int, **options: Any):
        self.loop, self.name, self.prompt, self.new = loop, name, prompt, new
        self.compresses = options.get("compresses", False)
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.progress: list[Progress] = []
        self.why = self.message = ""
        self.ended_at = 0.0
        self.over = threading.Event()
        self.begun = time.monotonic()
        loop.submit(Request(name, tuple(prompt), new, self.sink, **{"sampling": GREEDY, **options}))

    def sink(self, event: Event) -> None:
        match event:
            case Token(id):
                self.tokens.append(id)
                self.times.append(time.monotonic())
            case Progress():
                self.progress.append(event)
            case Finished(why, message):
                self.why, self.message, self.ended_at = why, message, time.monotonic()
                self.over.set()

    def wait(self) -> Client:
        assert self.over.wait(WAIT_SECONDS), f"{self.name} got no end"
        return self

    def described(self) -> dict[str, Any]:
        """For the test."""
        return {
            "prompt": self.prompt,
            "new": self.new,
            "compresses": self.compresses,
            "tokens": self.tokens,
            "why": self.why,
            "message": self.message,
            "cached": self.progress[-1].cached if self.progress else None,
            "ttft_s": self.times[0] - self.begun if self.times else None,
            "ended_at": self.ended_at,
        }


def tokens(count: int) -> list[int]:
    return random.choices(range(3, VOCABULARY), k=count)


def many(loop: ServingLoop, *, budget: bool) -> dict[str, Any]:
    """Requests of all lengths, some of which share beginnings, go on behind answers, or are cancelled; with a `budget`,
    some have compressed caches.
    """
    clients: list[Client] = []
    for number in range(REQUESTS):
        before: list[int] = []
        if clients and random.random() < 0.6:
            other = random.choice(clients)
            known = other.prompt + list(other.tokens)
            before = known[: random.randint(0, len(known))]
        prompt = (before + tokens(random.choice([1, 2, 10, 40, 150])))[-350:]
        options = {"priority": random.randint(0, 1), "compresses": budget and random.random() < 0.5}
        clients.append(Client(loop, str(number), prompt, random.randint(1, 12), **options))
        if random.random() < 0.2:
            time.sleep(random.random() / 20)
            loop.cancel(random.choice(clients).name)
        if random.random() < 0.3:
            random.choice(clients).wait()
    for client in clients:
        client.wait()
    stats = loop.stats()
    # What was asked before is there but for its last token.
    kept = (client for client in clients if client.why == "length" and not client.compresses)
    again = max(kept, key=lambda client: len(client.prompt))
    clients.append(Client(loop, "again", again.prompt, again.new).wait())
    return {
        "clients": [client.described() for client in clients],
        "stats": {
            "prompt": stats.prompt_tokens,
            "hit": stats.hit_tokens,
            "computed": stats.computed_tokens,
            "accepted": stats.accepted_tokens,
        },
        "left": [stats.waiting, stats.running],
        "documents": len(loop.documents()),
    }


def long(loop: ServingLoop) -> dict[str, Any]:
    """One long prompt, the same in every launch, then another one that begins like it."""
    prompt = [3 + (7 * index * index + index // 5) % (VOCABULARY - 3) for index in range(LONG)]
    clients = [Client(loop, "long", prompt, 4).wait(), Client(loop, "other", [*prompt[:100], 5, 6, 7], 4).wait()]
    return {"clients": [client.described() for client in clients]}


def stored(loop: ServingLoop, out: Path, store: Path, pids: list[int]) -> dict[str, Any]:
    """What `long` does; when all is on disk, every rank is killed."""
    results = long(loop)
    deadline = time.monotonic() + WAIT_SECONDS
    # A record is the last that is written of a prefix.
    while loop.stats().kv_tokens["disk"] > sum(len(json.loads(path.read_text())["tokens"]) for path in records(store)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    out.write_text(json.dumps(results))
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)
    return results


def records(store: Path) -> list[Path]:
    """Of all prefixes in a store."""
    return list(store.glob("*/*.json"))


def killed(loop: ServingLoop, out: Path) -> dict[str, Any]:
    """Clients that are waited for after a rank has gone; one asks when that is known."""
    clients = [Client(loop, str(number), tokens(20), 400) for number in range(3)]
    while not clients[0].tokens:
        time.sleep(0.01)
    out.with_suffix(".now").touch()
    for client in clients:
        client.wait()
    try:
        Client(loop, "late", [5], 1)
    except MegaKVError as error:
        late = str(error)
    results = {"clients": [client.described() for client in clients], "late": late}
    # The process may be about to end.
    out.write_text(json.dumps(results))
    return results


def kill_oneself(out: Path) -> None:
    """When rank 0's clients have begun."""
    while not out.with_suffix(".now").exists():
        time.sleep(0.01)
    out.with_suffix(".gone").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def raise_in_a_pass(engine: megakv.MegaKVEngine, out: Path, error: str) -> None:
    """An error of that name, in the midst of the first pass after rank 0's clients have begun."""

    def fail(*_: Any) -> None:
        if out.with_suffix(".now").exists():
            out.with_suffix(".gone").write_text(str(time.monotonic()))
            raise getattr(builtins, error)(0)

    list(engine.module.modules())[-1].register_forward_pre_hook(fail)


def references(engine: megakv.MegaKVEngine, clients: list[dict[str, Any]]) -> None:
    """What the engine says alone to each."""
    asked: list[Any] = [[(client["prompt"], client["new"], client["compresses"]) for client in clients]]
    dist.broadcast_object_list(asked)
    for number, (prompt, new, compresses) in enumerate(asked[0]):
        ids, cache = torch.tensor([prompt]), engine.new_cache(compresses=compresses)
        bias = [[[token], value] for token, value in LIKELY.items()]
        output = engine.generate_into(
            cache, ids, max_new_tokens=new, do_sample=False, pad_token_id=0, sequence_bias=bias
        )
        if clients:
            clients[number]["alone"] = output[0, len(prompt) :].tolist()


def own_pids() -> list[int]:
    """Of all ranks."""
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def main() -> None:
    out, (stage, *error) = Path(sys.argv[1]), sys.argv[4].split()
    cp, tp = (int(part) for part in sys.argv[3].split("x"))
    section: dict[str, Any] = {"context_parallel": {"size": cp}, "timeout_s": 60}
    if stage == "budget":
        section["fairkv"] = BUDGET
    elif stage == "offload":
        section["offload"] = {"enabled": True, "host_gb": 0.1, "page_kib": 4}
    elif stage == "mapping":
        section["fairkv"] = {"mapping": sys.argv[5]}
    config = {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}
    store = None if sys.argv[5] == "-" or stage == "mapping" else Path(sys.argv[5])
    quiet_libraries()
    # Whatever they cost: how busy the machine is must not decide what is tested.
    lookups.LEAST_GAIN = 0.0
    with orderly_end(), megakv.init_inference(sys.argv[2], config) as engine:
        rank = dist.get_rank()
        # Small chunks, so that prompts take several, and few tokens of memory, so that prefixes go.
        drawn = stage in ("random", "budget", "offload", "mapping")
        limits = {"kv_tokens": 1500, "host_kv_tokens": 500} if drawn else {}
        loop = ServingLoop(engine, ServingSettings(max_gap_s=0.05, chunk_tokens=64, store=store, **limits))
        results: dict[str, Any] = {}
        pids = own_pids()
        # As a server does: launchers end the other ranks when one has gone.
        signal.signal(signal.SIGTERM, lambda *_: loop.drain())

        def ask() -> None:
            random.seed(int(os.environ.get("MEGAKV_TEST_SEED", "0")))
            try:
                if drawn:
                    results.update(many(loop, budget=stage == "budget"))
                elif stage == "killed" or error:
                    results.update(killed(loop, out))
                elif stage == "store":
                    assert store is not None
                    stored(loop, out, store, pids)
                else:
                    results.update(long(loop))
            finally:
                loop.drain()

        thread = threading.Thread(target=ask, daemon=True)
        if rank == 0:
            thread.start()
        elif stage == "killed" and rank == dist.get_world_size() - 1:
            threading.Thread(target=kill_oneself, args=(out,), daemon=True).start()
        if error and rank == int(error[1]):
            raise_in_a_pass(engine, out, error[0])
        try:
            loop.run()
        finally:
            if rank == 0:
                thread.join(WAIT_SECONDS)
        references(engine, results.get("clients", []))
        if rank == 0:
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
