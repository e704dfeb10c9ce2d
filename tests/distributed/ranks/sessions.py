"""Started on every rank: conversations over several turns, batches, forks, and folders on disk.

Usage: sessions.py OUT.json WORK_DIR CPxTP STAGE DECODED, with STAGE ``quick`` or ``all`` (turns, and saving) or
``restore`` (going on from what an earlier launch saved, usually on another mesh); DECODED tokens for the balance.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from families import llama
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from megakv.base.errors import MegaKVError
from megakv.distributed.mesh import start_distributed
from megakv.engine.session import Session
from megakv.launcher.process import orderly_end, quiet_libraries

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
TURNS = [(1000, 2), (3, 2), (250, 1), (1, 20), (77, 3)]
RAGGED = [[200, 31, 7, 1, 90], [1, 64, 9, 33, 2], [17, 2, 120, 5, 1]]
METHODS: list[dict[str, str]] = [
    {},
    {"prefill": "pass_kv", "decode": "replicated"},
    {"prefill": "pass_q", "decode": "pass_q"},
    {"prefill": "all_gather", "decode": "pass_q"},
]


def ids_of(length: int, batch: int = 1, seed: int = 1) -> Tensor:
    """``[B, S]`` random tokens, the same on every rank."""
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))


class Plain:
    """The plain model, which rank 0 asks for all."""

    def __init__(self, folder: Path):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        """Of rank 0, on every rank."""
        said = [self._model.generate(ids, **options) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(said)
        assert said[0] is not None
        return said[0]


def make_engine(folder: Path, mesh: str, section: dict[str, str]) -> megakv.MegaKVEngine:
    """An engine on the whole mesh."""
    cp, tp = (int(part) for part in mesh.split("x"))
    config = {
        "dtype": "fp32",
        "tensor_parallel": {"tp_size": tp},
        "megakv": {"context_parallel": {"size": cp, **section}},
    }
    return megakv.init_inference(str(folder), config)


def spread(session: Session) -> int:
    """The largest difference between ranks in tokens of one sequence."""
    counts = session._cache.table.counts()
    return int((counts.max(axis=0) - counts.min(axis=0)).max())


def long_turns(engine: Any, plain: Plain) -> dict[str, Any]:
    """One conversation of unlike turns against the plain model on all of it."""
    session, history, equal = engine.session(), ids_of(0), []
    for turn, (length, new) in enumerate(TURNS):
        ids = ids_of(length, seed=turn)
        history = plain.generate(torch.cat([history, ids], dim=1), max_new_tokens=new, **GREEDY)
        equal.append(torch.equal(history, session.generate(ids, max_new_tokens=new, **GREEDY)))
    fork = session.fork()
    branches = []
    for index, branch in enumerate((session, fork, session)):
        ids = ids_of(5, seed=60 + index)
        before = branch.input_ids
        assert before is not None
        expected = plain.generate(torch.cat([before, ids], dim=1), max_new_tokens=3, **GREEDY)
        branches.append(torch.equal(expected, branch.generate(ids, max_new_tokens=3, **GREEDY)))
    result = {"equal": equal, "branches": branches, "spread": spread(session)}
    session.close()
    return result


def ragged_turns(engine: Any, plain: Plain) -> dict[str, Any]:
    """Five sequences of different new and cached lengths in one pass, against each alone."""
    session = engine.session()
    alone = [ids_of(0) for _ in RAGGED[0]]
    equal = []
    for turn, lengths in enumerate(RAGGED):
        width = max(lengths)
        ids, mask = torch.zeros(5, width, dtype=torch.long), torch.zeros(5, width, dtype=torch.long)
        for row, length in enumerate(lengths):
            fresh = ids_of(length, seed=100 * turn + row)
            # Padding on either side must do.
            place = slice(width - length, width) if turn % 2 else slice(0, length)
            ids[row, place], mask[row, place] = fresh[0], 1
            alone[row] = plain.generate(torch.cat([alone[row], fresh], dim=1), max_new_tokens=4, **GREEDY)
        before = ids[:, :0] if session.input_ids is None else session.input_ids
        found = session.generate(ids, mask, max_new_tokens=4, **GREEDY)
        kept = torch.equal(found[:, : before.shape[1]], before)
        equal.append([kept, *(torch.equal(found[row, -4:], alone[row][0, -4:]) for row in range(5))])
    result = {"equal": equal, "spread": spread(session)}
    session.close()
    return result


def balance(engine: Any, decoded: int) -> dict[str, Any]:
    """KV counts after many decoded tokens."""
    session = engine.session()
    session.generate(ids_of(37, 2), max_new_tokens=decoded, **GREEDY)
    result = {"spread": spread(session), "tokens": session._cache.table.counts().sum().item()}
    session.close()
    return result


def save(engine: Any, plain: Plain, folder: Path) -> dict[str, Any]:
    """Save a batch after two turns, over an older save too; say what the next turn should give."""
    session = engine.session()
    session.generate(ids_of(301, 2), max_new_tokens=3, **GREEDY)
    session.save(folder)
    session.generate(ids_of(40, 2, seed=2), max_new_tokens=3, **GREEDY)
    session.save(folder)
    # On the last rank alone the disk is full.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    last = dist.get_rank() == dist.get_world_size() - 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if last else limits[0], limits[1]))
    full = refused(lambda: session.save(folder))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    taken = refused(lambda: session.save(folder.parent))
    history = session.input_ids
    assert history is not None
    expected = plain.generate(torch.cat([history, ids_of(9, 2, seed=3)], dim=1), max_new_tokens=12, **GREEDY)
    found = session.generate(ids_of(9, 2, seed=3), max_new_tokens=12, **GREEDY)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (full, taken, len(list(folder.iterdir()))))
    return {"equal": torch.equal(expected, found), "expected": expected.tolist(), "said": said}


def refused(action: Any) -> str:
    """The message with which an action is refused; empty if it is not."""
    try:
        action()
    except (MegaKVError, ValueError) as error:
        return str(error)
    return ""


def restore(engine: Any, folder: Path, expected: list[list[int]]) -> dict[str, Any]:
    """Go on from a saved folder; then break copies of it, one way each."""
    session = engine.restore_session(folder)
    found = session.generate(ids_of(9, 2, seed=3), max_new_tokens=12, **GREEDY)
    messages = {}
    for name in ("missing", "truncated", "foreign", "garbled"):
        broken = folder.with_name(name)
        if dist.get_rank() == 0:
            shutil.copytree(folder, broken)
            shard, meta = sorted(broken.rglob("cp*"))[-1], broken / "session.json"
            if name == "missing":
                shard.unlink()
            elif name == "truncated":
                shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
            elif name == "foreign":
                meta.write_text(json.dumps({**json.loads(meta.read_text()), "model": "x"}))
            else:
                meta.write_text("{")
        dist.barrier()
        messages[name] = refused(lambda broken=broken: engine.restore_session(broken))
    messages["no folder"] = refused(lambda: engine.restore_session(folder / "nowhere"))
    messages["capacity"] = refused(lambda: session.generate(ids_of(4096, 2), max_new_tokens=1, **GREEDY))
    again = session.generate(ids_of(3, 2), max_new_tokens=2, **GREEDY)
    return {
        "equal": found.tolist() == expected,
        "spread": spread(session),
        "messages": messages,
        "intact": again.shape[1] == found.shape[1] + 5,
    }


def main() -> None:
    """Entry of every rank."""
    out, work, mesh, stage = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    quiet_libraries()
    start_distributed(tp_only=False, timeout_s=300)
    model = work / "model"
    if dist.get_rank() == 0 and not model.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).save_pretrained(model)
    dist.barrier()
    plain = Plain(model)
    results: dict[str, Any] = {}
    if stage != "restore":
        for section in METHODS if stage == "all" else METHODS[:1] + METHODS[2:3]:
            engine = make_engine(model, mesh, section)
            name = ", ".join(section.values()) or "auto"
            results[name] = {"long": long_turns(engine, plain), "ragged": ragged_turns(engine, plain)}
            if not section:
                results["balance"] = balance(engine, int(sys.argv[5]))
                results["save"] = save(engine, plain, work / "saved")
            engine.destroy()
    else:
        engine = make_engine(model, mesh, {})
        expected = json.loads((work / "expected.json").read_text())
        results["restore"] = restore(engine, work / "saved", expected)
        engine.destroy()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
        if stage != "restore":
            (work / "expected.json").write_text(json.dumps(results["save"]["expected"]))


if __name__ == "__main__":
    with orderly_end():
        main()
