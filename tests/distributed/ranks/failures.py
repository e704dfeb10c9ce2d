"""Started on every rank: calls that fail, on all ranks or on one, each followed by one that must work.

Usage: failures.py OUT.json FOLDER CPxTP METHOD KIND. FOLDER holds the model's config, and OUT.json gets what every rank
found. KIND is ``all``; ``deaf``: rank 1 fails where rank 0 waits in shared memory; or ``alone``: threads of one rank.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

import megakv
import megakv.distributed.peers
import megakv.forward.planning
from megakv.forward.choice import PrefillChoice
from megakv.launcher.process import orderly_end, quiet_libraries

PATIENCE_S = 0.5
"""After which ranks end what waits for a connection that is over."""
TIMEOUT_S = 600.0
"""Of no effect here: a rank that waits for it is a failure of the test."""
IDS = torch.randint(3, 100, (1, 77), generator=torch.Generator().manual_seed(3))
OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 5}
OTHER_OPTIONS: dict[str, Any] = {
    "num_return_sequences": 3,
    "max_new_tokens": 3,
    "eos_token_id": [7, 8],
    "repetition_penalty": 1.5,
    "generation_config": GenerationConfig(min_new_tokens=4),
    "attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0),
}
"""Each on one rank only."""


class Interrupted(BaseException):
    """No `Exception`, like a user's interruption."""


class Streamer:
    """Raises at one of its calls; `fails_at` 0 is its end."""

    def __init__(self, fails_at: int, error: BaseException):
        self.left, self.error = fails_at, error

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def end(self) -> None:
        if self.left < 0:
            raise self.error


class Processor:
    """A logits processor that raises, or chooses other tokens, at its third call."""

    def __init__(self, wrong: bool, raises: bool):
        self.wrong, self.raises, self.calls = wrong, raises, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.wrong and self.calls == 3:
            if self.raises:
                raise ZeroDivisionError("in a processor")
            return -scores
        return scores


class Rank:
    """One rank's engine, and what it found."""

    def __init__(self, engine: Any):
        self.engine, self.rank, self.size = engine, engine.mesh.rank, engine.mesh.world_size
        # Prompts are no steps of decoding, however fast they would be as such: ranks ask for a choice behind them.
        traits = engine._runtime.planner.traits
        engine._runtime.planner.traits = replace(traits, sliced_rows=0, spread_rows=0)
        self.found: dict[str, Any] = {}
        self.expected = self.tokens(self.generate())
        self.session = engine.session()
        self.session.generate(IDS, **OPTIONS)

    def generate(self, **more: Any) -> Tensor:
        return self.engine.generate(IDS, **{**OPTIONS, **more})

    @staticmethod
    def tokens(output: Tensor) -> list[int]:
        return output[0, IDS.shape[1] :].tolist()

    def fails(
        self, name: str, action: Callable[[], Any], own: BaseException | None = None, *, late: int | None = None
    ) -> None:
        """Note how a call ends, and whether the next one, which one rank may make late, is as before."""
        begun = time.monotonic()
        try:
            action()
            said = "no error"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            if own is not None:
                said += ", the same" if error is own else ", another"
        seconds = time.monotonic() - begun
        if self.rank == late:
            time.sleep(4 * PATIENCE_S)
        after = self.tokens(self.generate()) == self.expected
        self.found[name] = {"said": said, "after": after, "seconds": seconds}

    @contextmanager
    def out_of_memory(self, rank: int, module: str = "model.layers.1.mlp", *, delay_s: float = 0.0) -> Iterator[None]:
        """In the middle of every pass of one rank, or at its end."""

        def hook(*_: Any) -> None:
            if rank == self.rank:
                time.sleep(delay_s)
                raise torch.OutOfMemoryError("no memory left")

        handle = self.engine.module.get_submodule(module).register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def user_code(r: Rank) -> None:
    """What is run, or fails, on rank 0 alone, between passes."""
    for name, fails_at in (("first", 1), ("third", 3), ("last", 6), ("end", -1)):
        gone = Interrupted(name) if fails_at == 3 else KeyError(name)
        streamer = Streamer(fails_at, gone) if r.rank == 0 else None
        r.fails(f"streamer, {name}", lambda s=streamer: r.generate(streamer=s), gone)
    streamer = Streamer(100, KeyError("never")) if r.rank == 0 else None
    r.fails("streamer with beams", lambda: r.generate(streamer=streamer, num_beams=2))
    refused = OSError("in a criterion")

    def criterion(input_ids: Tensor, scores: Any, **_: Any) -> bool:
        if input_ids.shape[1] > IDS.shape[1] + 2:
            raise refused
        return False

    for beams in (1, 2):
        r.fails(f"criterion, {beams}", lambda b=beams: r.generate(stopping_criteria=[criterion], num_beams=b), refused)
    streamer = Streamer(2, KeyError("in a session"))
    r.fails("session", lambda: r.session.generate(IDS[:, :9], **OPTIONS, streamer=streamer))


def one_rank(r: Rank, rank: int) -> None:
    """What fails on one rank alone, wherever the others are by then."""
    mine = r.rank == rank
    r.fails(f"wrong option, {rank}", lambda: r.generate(**({"dola_layers": "low"} if mine else {})))
    for name, value in OTHER_OPTIONS.items():
        r.fails(f"{name}, {rank}", lambda n=name, v=value: r.generate(**({n: v} if mine else {})))
    r.fails(f"wrong input, {rank}", lambda: r.engine(IDS, **({"labels": IDS} if mine else {})))
    for raises in (True, False):
        processor = Processor(mine, raises)
        r.fails(f"processor, {rank}, {raises}", lambda p=processor: r.generate(logits_processor=[p]))
    wrong: dict[str, Any] = {"num_return_sequences": 3} if mine else {}
    r.fails(f"wrong turn, {rank}", lambda: r.session.generate(IDS[:, :5], **OPTIONS, **wrong))
    r.fails(f"wrong shape, {rank}", lambda: r.engine(IDS[0] if mine else IDS))
    r.fails(f"last token, {rank}", lambda: r.generate(logits_processor=[Processor(mine, False)], max_new_tokens=3))
    held = r.engine(IDS[:, :40]).past_key_values

    def short(module: str) -> None:
        with r.out_of_memory(rank, module):
            r.engine(IDS[:, 40:], past_key_values=held)

    r.fails(f"memory, {rank}, logits", lambda: short("lm_head"))
    whole, rest = r.engine(IDS).logits[:, 40:], r.engine(IDS[:, 40:], past_key_values=held).logits
    r.found[f"rest, {rank}"] = {"after": torch.allclose(whole, rest, atol=1e-4)}
    r.fails(f"memory, {rank}, late", lambda: short("model.layers.1.mlp"), late=rank)
    with r.out_of_memory(rank):
        if mine:
            # As where it was told less than others before a failure.
            r.engine._runtime.planner._decode_methods.clear()
        # The next call fails as well, and so does a pass by itself.
        for name, action in (("generate", r.generate), ("forward", lambda: r.engine(IDS))):
            try:
                action()
                r.found[f"memory, {rank}, {name}"] = {"said": "no error"}
            except BaseException as error:
                r.found[f"memory, {rank}, {name}"] = {"said": f"{type(error).__name__}: {error}"}
        try:
            r.session.generate(IDS[:, :30], **OPTIONS)
        except BaseException as error:
            r.found[f"memory, {rank}, session"] = {"said": f"{type(error).__name__}: {error}"}
    r.fails(f"other prompt, {rank}", lambda: r.engine.generate(IDS + mine, **OPTIONS))


def all_alike(r: Rank) -> None:
    """What all ranks are given wrong alike leaves their groups as they were."""
    lives = r.engine._comm.watch.failures.life
    r.fails("wrong on all", lambda: r.generate(num_return_sequences=3))
    r.fails("wrong input on all", lambda: r.engine(IDS, labels=IDS))
    if r.rank == 1:
        time.sleep(4 * PATIENCE_S)
    r.fails("wrong on all, one late", lambda: r.generate(num_return_sequences=3))

    def late() -> None:
        time.sleep(0.8 * r.rank)
        r.engine(IDS, labels=IDS)

    r.fails("wrong input on all, at other times", late)
    r.found["lives"] = r.engine._comm.watch.failures.life - lives


def new_groups(r: Rank) -> None:
    """Groups that take long to make anew are not ended by the failure before."""
    mesh = r.engine.mesh
    renew = mesh.renew

    def slowly() -> None:
        renew()
        time.sleep(0.8)

    def fail() -> None:
        with r.out_of_memory(r.rank):
            r.engine(IDS)

    object.__setattr__(mesh, "renew", slowly)
    r.fails("memory on all", fail)
    object.__delattr__(mesh, "renew")


def threads(r: Rank) -> None:
    """A second thread's call while one is under way."""
    begun, refused, said = threading.Event(), threading.Event(), []

    def hook(*_: Any) -> None:
        begun.set()
        refused.wait(60)

    def second() -> None:
        begun.wait(60)
        for action in (r.generate, lambda: r.engine(IDS)):
            try:
                action()
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        refused.set()

    handle = r.engine.module.model.layers[0].register_forward_pre_hook(hook)
    thread = threading.Thread(target=second)
    thread.start()
    r.found["under way"] = r.tokens(r.generate()) == r.expected
    thread.join()
    handle.remove()
    r.found["second"] = said


def decisions(r: Rank) -> None:
    """Ranks whose arithmetic differs: rank 0's choices hold, and all ranks do the same."""
    planner = r.engine._runtime.planner
    originals = {
        name: getattr(megakv.forward.planning, name) for name in ("plan_prefill", "choose_prefill", "choose_decode")
    }
    first, size = r.rank == 0, r.engine.mesh.cp_size
    megakv.forward.planning.choose_decode = lambda *_, **__: "pass_q" if first else "replicated"
    megakv.forward.planning.choose_prefill = lambda *_, **__: "pass_q" if first else "pass_kv"
    planner._decode_methods.clear()
    r.found["layers"] = r.tokens(r.generate()) == r.expected
    parts = (IDS.shape[1] - 3 * (size - 1), *[3] * (size - 1))
    choice = PrefillChoice("runahead", (parts if first else parts[::-1],), "runahead", {"runahead": 1.0})
    megakv.forward.planning.plan_prefill = lambda *_, **__: choice
    # There are predictions to decide from.
    planner._predictions = object()
    r.found["partitions"] = r.tokens(r.generate()) == r.expected
    r.found["chosen"] = planner.choice.partitions == (parts,)
    planner._predictions = None
    for name, original in originals.items():
        setattr(megakv.forward.planning, name, original)


def alone(r: Rank) -> None:
    """Threads of one rank take turns."""
    results: list[list[int]] = []
    callers = [threading.Thread(target=lambda: results.append(r.tokens(r.generate()))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    class Destroyer(Streamer):
        def put(self, value: Tensor) -> None:
            r.engine.destroy()

    r.fails("destroyed", lambda: r.generate(streamer=Destroyer(0, KeyError("never"))))
    r.found["results"] = [result == r.expected for result in results]


def main() -> None:
    """Entry of every rank."""
    out, folder, mesh, method, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5]
    cp, tp = (int(part) for part in mesh.split("x"))
    torch.set_num_threads(1)
    megakv.distributed.peers.UNHEARD_SECONDS = PATIENCE_S
    quiet_libraries()
    section = {"context_parallel": {"size": cp, "prefill": method}, "load": "random", "timeout_s": TIMEOUT_S}
    config = {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}
    r = Rank(megakv.init_inference(folder, config))
    if kind == "deaf":
        assert r.engine.mesh.shared_memory
        with r.out_of_memory(1, delay_s=1.0):
            r.generate()
    elif kind == "alone":
        alone(r)
    else:
        user_code(r)
        all_alike(r)
        new_groups(r)
        for rank in range(r.size):
            one_rank(r, rank)
        threads(r)
        if cp > 1 and method == "auto":
            decisions(r)
        history, turn = r.session.input_ids, IDS[:, :11]
        whole = r.engine.generate(torch.cat([history, turn], dim=1), **OPTIONS)
        r.found["session goes on"] = torch.equal(r.session.generate(turn, **OPTIONS), whole)
    everyone = r.engine._comm.gather_objects(r.found)
    r.engine.destroy()
    if r.rank == 0:
        out.write_text(json.dumps(everyone))


if __name__ == "__main__":
    with orderly_end():
        main()
