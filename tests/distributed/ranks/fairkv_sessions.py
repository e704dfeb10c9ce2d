"""Started on every rank: conversations over compressed caches, their forks, and folders on disk.

Usage: fairkv_sessions.py OUT.json WORK_DIR CPxTP STAGE COPIES, with STAGE ``save`` or ``restore`` (usually on another
mesh), and what copies of heads divide.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from fairkv import OFFLOAD, begin, ids_of, kept_slots, written_mapping

import megakv
from megakv.base.errors import MegaKVError
from megakv.launcher.process import orderly_end

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
SOURCES = {
    "compressing": ("compressing", "mapped"),
    "plain": ("offloaded", "mapped"),
    "mapped": ("mapped", "both"),
    "offloaded": ("offloaded", "compressing"),
    "both": ("both", "mapped"),
}
"""By engine, the ones whose sessions it goes on with: those of one that is like it, and another's."""
FAIRKV = {"method": "ada_snapkv", "budget": 0.3, "window": 8, "min_tokens": 64}


def go_on(session: Any) -> list[list[int]]:
    """A short turn, a long one that is compressed, and a short one again; the new tokens of each."""
    found = []
    for seed, length in enumerate((9, 80, 11)):
        before = session.input_ids.shape[1] + length
        found.append(session.generate(ids_of(length, 2, seed + 50), max_new_tokens=6, **GREEDY)[:, before:].tolist())
    return found


def save(engine: Any, folder: Path) -> dict[str, Any]:
    """Two turns, a save, a fork, a turn that fails, and what comes next on both branches."""
    session = engine.session()
    mask = torch.ones(2, 190, dtype=torch.long)
    mask[1, :60] = 0
    session.generate(ids_of(190, 2, 1), mask, max_new_tokens=5, **GREEDY)
    session.generate(ids_of(12, 2, 2), max_new_tokens=4, **GREEDY)
    session.save(folder)
    kept = kept_slots(engine, session._cache)
    fork = session.fork()
    held = session._cache.nbytes()

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("out of memory, say")

    handle = engine.module.model.layers[1].register_forward_pre_hook(fail)
    broken = ""
    try:
        session.generate(ids_of(90, 2, 9), max_new_tokens=2, **GREEDY)
    except RuntimeError as error:
        broken = str(error)
    handle.remove()
    intact = kept_slots(engine, session._cache) == kept and session._cache.nbytes() <= 1.05 * held
    expected = go_on(session)
    return {"expected": expected, "fork": go_on(fork) == expected, "broken": broken, "intact": intact, "kept": kept}


def restore(engine: Any, folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Go on from the folder, also on an engine that compresses nothing; then from a broken one."""
    session = engine.restore_session(folder)
    kept = engine._runtime.compressor is None or kept_slots(engine, session._cache) == expected["kept"]
    found = go_on(session)
    broken = folder.with_name("broken")
    if dist.get_rank() == 0:
        shutil.copytree(folder, broken)
        meta = broken / "session.json"
        values = json.loads(meta.read_text())
        meta.write_text(json.dumps({**values, "compressed": [[[0, 10**6]], []]}))
    dist.barrier()
    message = ""
    try:
        engine.restore_session(broken)
    except MegaKVError as error:
        message = str(error)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(broken)
    dist.barrier()
    return {"equal": found == expected["expected"], "first": found[0] == expected["expected"][0], "kept": kept,
            "message": message}  # fmt: skip


def main() -> None:
    """Entry of every rank."""
    out, work, mesh, stage = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    folder = work / "session-model"
    begin(folder)
    cp, tp = (int(part) for part in mesh.split("x"))
    results: dict[str, Any] = {}
    mapping = work / f"mapping-{tp}.json"
    written_mapping(mapping, tp)
    mapped = {"fairkv": {**FAIRKV, "mapping": str(mapping), "copies": sys.argv[5]}}
    offloaded = {"fairkv": FAIRKV, "offload": OFFLOAD}
    sections = {"compressing": {"fairkv": FAIRKV}, "plain": {}, "mapped": mapped, "offloaded": offloaded}
    sections["both"] = {**mapped, "offload": OFFLOAD}
    for name, section in sections.items():
        config = {
            "dtype": "fp32",
            "tensor_parallel": {"tp_size": tp},
            "megakv": {"context_parallel": {"size": cp}, **section},
        }
        engine = megakv.init_inference(str(folder), config)
        if stage == "restore":
            source, other = SOURCES[name]
            expected = json.loads((work / "save.json").read_text())
            results[name] = restore(engine, work / source, expected[source])
            # Heads lay elsewhere.
            results[name]["foreign"] = go_on(engine.restore_session(work / other))[0] == expected[other]["expected"][0]
        elif section:
            results[name] = save(engine, work / name)
        engine.destroy()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
