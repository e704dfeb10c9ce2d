"""The ranks of test_launch.py: an all-reduce; then every rank writes what it got, and one may fail or stay behind."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("job", type=Path)
job = json.loads(parser.parse_args().job.read_text())

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([float(value) for value in job["values"][rank]])
dist.all_reduce(total)
Path(job["results"], f"{rank}.json").write_text(json.dumps({"total": total.tolist(), "pid": os.getpid()}))
dist.destroy_process_group()
match job.get("then") if rank == job.get("odd_rank") else None:
    case "fail":
        print("rank failed on purpose", file=sys.stderr)
        sys.exit(3)
    case "hang":
        time.sleep(1000)
    case "leave":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
