"""Started on every rank: engines over folders of quantised models, on one mesh.

Usage: quantised_folders.py CASES.json OUT.json CPxTP. Cases are folders, each with the tokens that are expected.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from quantised_folders import GREEDY, PROMPT
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.base.errors import MegaKVError
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries


def outcome(folder: str, expected: list[int], config: dict[str, Any]) -> str:
    """What an engine came to: ``equal``, the tokens that it gave instead, or why it was refused."""
    try:
        with megakv.init_inference(folder, config) as engine:
            session = engine.session()
            found = session.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
            whole = engine.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    except (MegaKVError, ValueError) as error:
        return f"refused: {error}"
    return "equal" if found == whole == expected else f"differs: {found}, {whole}, expected {expected}"


def main() -> None:
    """Entry of every rank."""
    cases, out, mesh = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=120)
    cp, tp = map(int, mesh.split("x"))
    config = {"tensor_parallel": {"tp_size": tp}, "megakv": {"context_parallel": {"size": cp}}}
    found = {folder: outcome(folder, expected, config) for folder, expected in cases.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        assert all(each == found for each in everywhere), everywhere
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    with orderly_end():
        main()
