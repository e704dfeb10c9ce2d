"""The ranks of test_launch.py: an all-reduce; then every rank writes what it got, and one may fail or stay behind.

They start the world as a plain script does: by nothing but MegaKV, which leaves no variable behind.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megakv.distributed.mesh import start_distributed, stop_distributed

parser = argparse.ArgumentParser()
parser.add_argument("job", type=Path)
job = json.loads(parser.parse_args().job.read_text())

variables = dict(os.environ)
start_distributed(tp_only=False, timeout_s=60)
rank = dist.get_rank()
total = torch.tensor([float(value) for value in job["values"][rank]])
dist.all_reduce(total)
Path(job["results"], f"{rank}.json").write_text(json.dumps({"total": total.tolist(), "pid": os.getpid()}))
stop_distributed()
assert os.environ == variables
if len(job["values"]) == 1:
    # Once more: where nobody started it, a process can.
    start_distributed(tp_only=False, timeout_s=60)
    stop_distributed()
match job.get("then") if rank == job.get("odd_rank") else None:
    case "fail":
        print("rank failed on purpose", file=sys.stderr)
        sys.exit(3)
    case "hang":
        time.sleep(1000)
    case "leave":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
