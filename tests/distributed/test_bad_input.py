"""Bad input ends every rank within seconds, with one message that names what is wrong, and nothing is left.

All kinds go through launcher/run.py on forked ranks, where starting costs little; one that a single rank sees, with
`--full` all of them, also through the deepspeed launcher.
"""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.distributed.bad_inputs import KINDS, LACKING, Inputs, Kind
from tests.distributed.launch import ROOT, run_forked, run_ranks

RANKS = Path(__file__).parent / "ranks"
RUN = ROOT / "launcher" / "run.py"
# On a busy machine. Who waited for a rank that has ended would do so for `timeout_s`, which is ten minutes.
LAUNCH_SECONDS = 90.0


def commands(inputs: Inputs, kind: Kind) -> list[list[str]]:
    """Arguments of launcher/run.py on two ranks."""
    good, bad = inputs.command(), inputs.command(**kind.change(inputs))
    return [bad if kind.only in (None, rank) else good for rank in range(2)]


def assert_one_message(text: str, pattern: str) -> None:
    """One error in all that was written, and it says what is wrong."""
    messages = [line for line in text.splitlines() if "megakv" in line and "error" in line]
    assert len(messages) == 1 and re.search(f"^megakv: error: .*?{pattern}", messages[0]), text
    assert "Traceback" not in text, text
    assert "was lost" not in text, text


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def test_good_input_works(inputs: Inputs) -> None:
    result = run_ranks(RUN, *inputs.command(), ranks=2, timeout=LAUNCH_SECONDS).check()
    assert "151 prompt + 3 new tokens" in result.stdout


def kinds(mark: Callable[[Kind], list[pytest.MarkDecorator]]) -> list[Any]:
    """The names of all kinds, marked; some processors lack no type."""
    complete = torch.float16 in get_accelerator().supported_dtypes()
    impossible = {LACKING: pytest.mark.skipif(complete, reason="this device computes in float16, too")}
    own = {name: [impossible[name]] if name in impossible else [] for name in KINDS}
    return [pytest.param(name, marks=[*mark(kind), *own[name]]) for name, kind in KINDS.items()]


@pytest.mark.parametrize("name", kinds(lambda kind: [pytest.mark.full if kind.patience else pytest.mark.drawn(12)]))
def test_every_rank_ends_with_one_message(inputs: Inputs, name: str) -> None:
    kind = KINDS[name]
    result = run_forked(RUN, commands(inputs, kind), timeout=LAUNCH_SECONDS)
    assert all(code not in (0, None) for code in result.codes), result
    assert result.leftovers == []
    assert_one_message(result.stderr, kind.message)
    assert "megakv: error" not in result.stdout


def test_where_ranks_cannot_meet_is_named(inputs: Inputs) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for variables, message in (
            ({"MASTER_PORT": str(port)}, rf"port {port} is in use on this host .*: give another one \(--master_port"),
            ({"MASTER_PORT": "many"}, r"MASTER_PORT = 'many': allowed: the number of a port, up to 65535$"),
            ({"MASTER_ADDR": "none.invalid"}, r"MASTER_ADDR = 'none\.invalid' is no host that is known here"),
        ):
            result = run_forked(RUN, [inputs.command()] * 2, timeout=LAUNCH_SECONDS, env=variables)
            assert all(code not in (0, None) for code in result.codes), result
            assert_one_message(result.stderr, message)


@pytest.mark.parametrize("name", kinds(lambda kind: [] if kind.quick else [pytest.mark.full]))
def test_the_launcher_ends_with_one_message(inputs: Inputs, name: str) -> None:
    kind = KINDS[name]
    ranks = commands(inputs, kind)
    if ranks[0] == ranks[1]:
        result = run_ranks(RUN, *ranks[0], ranks=2, timeout=LAUNCH_SECONDS, launcher="deepspeed")
    else:
        path = inputs.json("own.json", ranks)
        result = run_ranks(RANKS / "own_command.py", path, ranks=2, timeout=LAUNCH_SECONDS, launcher="deepspeed")
    assert result.returncode not in (0, None), result
    assert result.leftovers == []
    assert_one_message(result.stderr, kind.message)
    assert "Traceback" not in result.stdout and "megakv: error" not in result.stdout
