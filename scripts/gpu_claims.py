"""What MegaKV claims of a GPU, part by part in the order of worth, within a time; started by gpu_claims.sh.

Every part is a command of its own with a limit of its own, which ends it, and with it all that it started. What there
is to say of it is written at once: DIR/claims.json has all parts with their results so far, DIR/log.txt what they
printed. What has no time left is said to be left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 420.0
"""For everything, set-up included: a mend can be measured again in a quarter of an hour."""
LEAST = 8.0
"""Seconds that a part begins with at least."""
GRACE = 5.0
"""Seconds in which a part that is told to end may write what it has."""
PATIENCE = 10.0
"""Times its limit a part may take in a rehearsal, where others may be at work on the processor."""
TESTS = "tests/gpu/test_{}_gpu.py"


@dataclass(frozen=True)
class Part:
    """Some claims: a script of this checkout, or tests.

    Parameters
    ----------
    name, says : str
        What they are of.
    seconds : float
        At most.
    command : str
        The script and its arguments; of tests, those of pytest.
    tiny : str
        The same in a rehearsal, on a processor.
    """

    name: str
    says: str
    seconds: float
    command: str
    tiny: str

    @property
    def tests(self) -> bool:
        return self.command.startswith("tests/")


def _tests(*names: str) -> str:
    return " ".join(TESTS.format(name) for name in names)


_DECODE = "benchmarks/decode_gpu.py --repeats 2 --new 16"
_TINY = "benchmarks/decode_gpu.py --device cpu --contexts 9 --batches 1 --layers 1 --new 6 --repeats 1"
_KVPR = "--only latency --methods transformers,stream,kvpr,auto"
_KVPR_TINY = (
    f"benchmarks/offload.py --quick {_KVPR} --layers 1 --prompt 32 --new 6 --repeats 1 --least-repeats 1 --hidden 64 "
    "--cell-seconds 1"
)
_QUICK = ("partial", "together", "fairkv", "graphs", "engine")
PARTS = (
    Part("tests", "kernels and engines on the GPU", 60, *[_tests(*_QUICK)] * 2),
    Part(
        "large", "TTFT and TTIT over transformers', Llama-3.1-8B's shape with random weights, 8K and 32K tokens", 45,
        f"{_DECODE} --models llama3_8b --contexts 8K,32K --batches 1", f"{_TINY} --models smollm2",
    ),
    Part(
        "batches", "the same of 1 and 16 sequences of 1K tokens", 30,
        f"{_DECODE} --models llama3_8b --contexts 1K --batches 1,16", f"{_TINY} --models smollm2",
    ),
    Part(
        "small", "the same of SmolLM2's shape, 1K to 32K tokens", 45,
        f"{_DECODE} --models smollm2 --contexts 1K,8K,32K --batches 1,16 --most-tokens 128K",
        f"{_TINY} --models smollm2 --dtype bf16",
    ),
    Part(
        "kernels", "where a prompt's time goes, kernel by kernel, beside transformers; attention by library; FP8", 30,
        "scripts/gpu_kernels.py", "scripts/gpu_kernels.py --tiny",
    ),
    Part(
        "kvpr_6.7b", "KVPR's Table 3: two layers of OPT-6.7B's shape, six cells", 50,
        f"benchmarks/offload.py --gpu {_KVPR} --shapes opt-6.7b --layers 2",
        _KVPR_TINY,
    ),
    Part(
        "kvpr_13b", "KVPR's Table 4: the same of OPT-13B's shape", 50,
        f"benchmarks/offload.py --gpu {_KVPR} --shapes opt-13b --layers 2",
        _KVPR_TINY,
    ),
    Part(
        "fairkv", "FairKV's step at TP 4 and 8, by every rank's kernels on one GPU", 45,
        "benchmarks/fairkv_virtual_ranks.py --device cuda --tp 4,8 --batches 60 --kept 128,1K --layers 2 --repeats 3 "
        "--methods nodp,dp4,split4,time --profile-seconds 10",
        "benchmarks/fairkv_virtual_ranks.py --tp 4 --batches 1 --kept 64 --layers 1 --repeats 1 --methods nodp,split1 "
        "--hidden 64 --intermediate 64 --head-dim 16 --profile-seconds 0",
    ),
    Part("fp8", "FP8 layers", 15, *[_tests("fp8")] * 2),
    Part(
        "attention", "attention of a million tokens against the GPU's matrix rate", 35,
        "benchmarks/limits.py --device cuda --parts ring --contexts 128K,1M --ranks 4,8 --repeats 2",
        "benchmarks/limits.py --device cpu --parts ring --contexts 64 --ranks 2 --repeats 1 --matrix 64",
    ),
    Part("offload_tests", "offloaded caches", 60, *[_tests("offload", "offload_benchmark")] * 2),
)  # fmt: skip


def arguments_of(part: Part, out: Path, *, rehearse: bool) -> list[str]:
    """The command line of a part, whose results go to a file."""
    words = (part.tiny if rehearse else part.command).split()
    if part.tests:
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", f"--junitxml={out}", *words]
    else:
        words += ["--json", str(out)]
    return [sys.executable, *words]


def run(part: Part, folder: Path, seconds: float, *, rehearse: bool) -> dict[str, Any]:
    """What came of a part: `ended` says how, `result` is what it wrote."""
    out, began = folder / f"{part.name}.{'xml' if part.tests else 'json'}", time.monotonic()
    out.unlink(missing_ok=True)
    environment = {**os.environ, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if rehearse:
        environment["DS_ACCELERATOR"] = "cpu"
    with (folder / "log.txt").open("a") as log:
        print(f"== {part.name}: {part.says}", file=log, flush=True)
        command = arguments_of(part, out, rehearse=rehearse)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ended = _wait(process, seconds)
        finally:
            # Whoever ends this ends what it started, which would hold the GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return {
        "part": part.name, "says": part.says, "limit_s": seconds, "seconds": time.monotonic() - began, "ended": ended,
        "command": command[1:], "result": _tested(out) if part.tests else _read(out),
    }  # fmt: skip


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """How a process and all that it started came to their end: interrupted first, so that it may write what it has."""
    for number, patience in ((None, seconds), (signal.SIGINT, GRACE), (signal.SIGKILL, GRACE)):
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        try:
            status = process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        # Whoever it started, and left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return "out of time" if number is not None else "well" if status == 0 else f"with status {status}"
    return "not at all"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _tested(path: Path) -> Any:
    """Of tests, how many came to what, and what those that failed said."""
    try:
        cases = [*ElementTree.parse(path).iter("testcase")]
    except (OSError, ElementTree.ParseError):
        return None
    found: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": [], "seconds": {}}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [each for kind in ("failure", "error") for each in case.iter(kind)]
        if wrong:
            found["failed"].append({"test": name, "says": (wrong[0].get("message") or "")[:500]})
        else:
            found["skipped" if case.find("skipped") is not None else "passed"] += 1
        found["seconds"][name] = float(case.get("time") or 0.0)
    found["seconds"] = dict(sorted(found["seconds"].items(), key=lambda each: -each[1])[:10])
    return found


def device() -> dict[str, Any]:
    """What computes; asked in a process of its own, which does not hold the GPU's memory."""
    code = (
        "import json, torch, transformers; there = torch.cuda.is_available(); print(json.dumps({'torch': "
        "torch.__version__, 'transformers': transformers.__version__, 'cuda': torch.version.cuda, 'device': "
        "torch.cuda.get_device_name() if there else None}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"problem": done.stderr[-500:]}


def line(found: dict[str, Any]) -> str:
    """A part in a line."""
    result, shown = found["result"], ""
    if isinstance(result, dict) and "passed" in result:
        shown = f"{result['passed']} passed, {len(result['failed'])} failed, {result['skipped']} skipped"
    elif result is not None:
        shown = "results written"
    return f"{found['part']:14} {found['seconds']:6.1f} of {found['limit_s']:5.1f} s  ended {found['ended']}  {shown}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything, set-up included")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_claims", help="folder of the results")
    parser.add_argument("--only", default=",".join(part.name for part in PARTS), help="parts, in their order")
    parser.add_argument("--rehearse", action="store_true", help="every part on the processor, tiny")
    parser.add_argument("--began", type=float, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    known = {part.name: part for part in PARTS}
    wanted = arguments.only.split(",")
    if unknown := sorted({*wanted} - {*known}):
        parser.error(f"--only {','.join(unknown)}: allowed: {', '.join(known)}")
    began = time.monotonic() - (0.0 if arguments.began is None else max(0.0, time.time() - arguments.began))
    # As an interruption: what runs then is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "log.txt").unlink(missing_ok=True)
    document: dict[str, Any] = {
        "benchmark": "gpu_claims", "machine": device(), "args": {"seconds": arguments.seconds, "only": wanted},
        "rehearsed": arguments.rehearse, "set_up_s": time.monotonic() - began, "rows": [], "left_out": [],
    }  # fmt: skip
    for part in (part for part in PARTS if part.name in wanted):
        left = arguments.seconds - GRACE - (time.monotonic() - began)
        if left < LEAST:
            document["left_out"].append(part.name)
            print(f"{part.name:14} left out: {max(0.0, left):.0f} s are left", flush=True)
        else:
            limit = part.seconds * (PATIENCE if arguments.rehearse else 1.0)
            found = run(part, arguments.out, min(limit, left), rehearse=arguments.rehearse)
            document["rows"].append(found)
            print(line(found), flush=True)
        document["seconds"] = time.monotonic() - began
        written = arguments.out / "claims.json.new"
        written.write_text(json.dumps(document, indent=1) + "\n")
        written.replace(arguments.out / "claims.json")
    return int(any(row["ended"] != "well" for row in document["rows"]))


if __name__ == "__main__":
    sys.exit(main())
