"""Started on every rank: the last one is killed before it makes an engine, as the others do.

The others ignore SIGTERM: the launcher sends it at once, and on a busy machine it would end them before they notice.

Usage: absent.py FOLDER, with a model's config.
"""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import quiet_libraries, report_errors

signal.signal(signal.SIGTERM, signal.SIG_IGN)
quiet_libraries()
with report_errors():
    start_distributed(tp_only=False, timeout_s=60)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    section = {"context_parallel": {"size": dist.get_world_size()}, "load": "random"}
    megakv.init_inference(sys.argv[1], {"dtype": "fp32", "megakv": section})
