"""Started on every rank: one kind of work for ever, until the test ends or stops a rank in the middle of it.

Usage: working.py FOLDER CPxTP WORK TIMEOUT_S. FOLDER holds the model's config. Every rank leaves its pid in
``FOLDER/begun-RANK`` once it has done the work once. What is saved lies in ``FOLDER/session``, on disk in
``FOLDER/disk``. With WORK ``restore`` the sessions in all folders that ``FOLDER/sessions.json`` names are gone on with
instead, and whether they are whole is left in ``FOLDER/restored.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megakv
from megakv.launcher.process import quiet_libraries, report_errors

Step = Callable[[], Any]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
OFFLOAD = {"enabled": True, "host_gb": 0.05, "page_kib": 16, "chunk_tokens": 64, "emulated_link_gb_s": 0.05}
DISK = {**OFFLOAD, "host_gb": 24 * 16 / (1 << 20), "disk_gb": 0.05}


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    """``[1, S]`` random tokens, the same on every rank."""
    return torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(seed))


def prefilling(engine: megakv.MegaKVEngine, folder: Path) -> Step:
    """Prompts, one after the other."""
    return lambda: engine(ids_of(2048), logits_to_keep=1)


def decoding(engine: megakv.MegaKVEngine, folder: Path) -> Step:
    """Long answers to prompts of middling length."""
    return lambda: engine.generate(ids_of(200), max_new_tokens=40, **GREEDY)


def saving(engine: megakv.MegaKVEngine, folder: Path) -> Step:
    """A session saved over itself after every short turn."""
    session = engine.session()
    session.generate(ids_of(1200), max_new_tokens=2, **GREEDY)

    def save() -> None:
        session.cut_back(min(session.length, 1210))
        session.generate(ids_of(2, seed=session.length), max_new_tokens=2, **GREEDY)
        session.save(folder / "session")

    return save


WORK: dict[str, tuple[Callable[[megakv.MegaKVEngine, Path], Step], dict[str, str], dict[str, Any]]] = {
    "prefill": (prefilling, {}, {}),
    "chain": (prefilling, {"prefill": "runahead"}, {}),
    "decode": (decoding, {}, {}),
    "decode pass_q": (decoding, {"decode": "pass_q"}, {}),
    "save": (saving, {}, {}),
    "offload stream": (decoding, {}, {**OFFLOAD, "method": "stream"}),
    "offload chunked": (decoding, {"prefill": "runahead"}, {**OFFLOAD, "method": "chunked", "weights": True}),
    "offload cpu_rank": (decoding, {}, {**OFFLOAD, "method": "cpu_rank"}),
    "disk": (decoding, {}, {**DISK, "method": "stream"}),
    "disk save": (saving, {}, {**DISK, "method": "kvpr"}),
}
"""What is done, and its settings of ``context_parallel`` and ``offload``."""


def restore(engine: megakv.MegaKVEngine, folder: Path) -> None:
    """Go on with saved sessions, and with the same conversation read anew."""
    found = {}
    for name in json.loads((folder / "sessions.json").read_text()):
        session = engine.restore_session(Path(name, "session"))
        assert session.input_ids is not None
        whole = torch.cat([session.input_ids, ids_of(5)], dim=1)
        expected = engine.generate(whole, max_new_tokens=4, **GREEDY)
        found[name] = torch.equal(session.generate(ids_of(5), max_new_tokens=4, **GREEDY), expected)
    (folder / "restored.json").write_text(json.dumps(found))


def main() -> None:
    """Entry of every rank."""
    folder, mesh, work = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    cp, tp = (int(part) for part in mesh.split("x"))
    begin, parallel, offload = WORK.get(work, (None, {}, {}))
    section: dict[str, Any] = {"context_parallel": {"size": cp, **parallel}, "load": "random"}
    if offload:
        section["offload"] = {**offload, "disk_path": str(folder / "disk")}
    section["timeout_s"] = float(sys.argv[4])
    torch.set_num_threads(1)
    quiet_libraries()
    with report_errors():
        engine = megakv.init_inference(
            str(folder), {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}
        )
        if begin is None:
            restore(engine, folder)
            return
        step = begin(engine, folder)
        step()
        # Whole or not at all: the test reads it.
        partial = folder / f"partial-{engine.mesh.rank}"
        partial.write_text(str(os.getpid()))
        partial.rename(folder / f"begun-{engine.mesh.rank}")
        while True:
            step()


if __name__ == "__main__":
    main()
