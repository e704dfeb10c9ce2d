"""Started on two ranks: the threads that exchange data, while an engine lives and when it and the world have ended.

Usage: ending.py FOLDER, which holds the model's config; rank 0 leaves ``threads.json`` there and ends in good order.
Rank 1 fails when rank 0 has ended, with an exchange under way that will never come to an end.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import megakv
from megakv.base.errors import MegaKVError
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries


def hidden_threads() -> int:
    """Threads of this process that Python does not know of."""
    known = {thread.native_id for thread in threading.enumerate()}
    return sum(int(task.name) not in known for task in Path("/proc/self/task").iterdir())


def main() -> None:
    """Entry of every rank."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    quiet_libraries()
    found = {"before": hidden_threads()}
    start_distributed(tp_only=False, timeout_s=60)
    found["world"] = hidden_threads()
    config = {"dtype": "fp32", "megakv": {"load": "random", "context_parallel": {"size": 2}}}
    engine = megakv.init_inference(str(folder), config)
    session = engine.session()
    session.generate(torch.arange(3, 40)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    found["engine"] = hidden_threads()
    engine.destroy()
    found["destroyed"] = hidden_threads()
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(3), async_op=True)
        while not (folder / "threads.json").exists():
            time.sleep(0.02)
        raise RuntimeError("failed on purpose")
    try:
        _ = engine.mesh.group("cp")
    except MegaKVError as error:
        found["message"] = str(error)
    megakv.stop_distributed()
    found["ended"] = hidden_threads()
    (folder / "partial.json").write_text(json.dumps(found))
    (folder / "partial.json").rename(folder / "threads.json")


if __name__ == "__main__":
    with orderly_end():
        main()
