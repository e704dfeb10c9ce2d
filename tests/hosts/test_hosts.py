"""Hosts on one machine: what they are to each other, what their links carry, and that nothing of them stays."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import randint

import psutil
import pytest

from tests.distributed.launch import ROOT
from tests.hosts import cluster, tools
from tests.hosts.cluster import Hosts
from tests.hosts.control import ask_rate
from tests.hosts.links import parse_rate
from tests.hosts.rates import assert_between
from tests.patience import Patience, status_within

TOOL = [sys.executable, str(ROOT / "scripts" / "hosts.py")]
# Says which namespaces it is in, then stays.
STAY = ["bash", "-c", "readlink /proc/self/ns/net /proc/self/ns/pid; ssh host2 readlink /proc/self/ns/net; sleep 1000"]
END_S = 20


@pytest.fixture
def two() -> Iterator[Hosts]:
    with Hosts(count=2, slots=3) as hosts:
        yield hosts


def namespaces(processes: Iterable[psutil.Process] | None = None) -> set[str]:
    """All network and process namespaces that these processes are in, or any of this machine."""
    found = set()
    for process in psutil.process_iter() if processes is None else processes:
        for kind in ("net", "pid"):
            try:
                found.add(os.readlink(f"/proc/{process.pid}/ns/{kind}"))
            except OSError:
                continue
    return found


def await_gone(names: set[str]) -> None:
    patience = Patience(END_S)
    while left := names & namespaces():
        assert not patience.over, f"left: {left}"
        time.sleep(0.1)


def await_lines(read: Callable[[], str], lines: int) -> list[str]:
    patience = Patience(END_S)
    while len(text := read().splitlines()) < lines:
        assert not patience.over, text
        time.sleep(0.05)
    return text


def test_hosts_are_apart_and_reach_each_other(two: Hosts) -> None:
    assert two.hostfile.read_text() == "host1 slots=3\nhost2 slots=3\n"
    script = "hostname; ssh host2 hostname; hostname -I; ssh host2 hostname -I; pdsh -R ssh -w host2 echo hi"
    result = two.run(["bash", "-c", script], timeout=30).check()
    assert result.stdout.split() == ["host1", "host2", "10.77.0.1", "10.77.0.2", "host2:", "hi"]
    word = f"word{randint(0, 10**9)}"
    script = f"ssh host2 'echo > /dev/shm/{word}; exec -a {word} sleep 2' & sleep 1; ls /dev/shm; ps -A -o args; wait"
    result = two.run(["bash", "-c", script], timeout=30).check()
    assert not [line for line in result.stdout.splitlines() if line.startswith(word)]
    assert not Path("/dev/shm", word).exists()


@pytest.mark.drawn(1, "limits")
def test_limits_hold_in_each_direction_and_can_be_changed(two: Hosts) -> None:
    def free() -> float:
        return two.measure().bits_per_s

    assert_between(1e9, free, math.inf)
    for rate, name, host in ((200e6, "200mbit", None), (50e6, "50mbit", 1)):
        two.set_rate(name, host=host)
        for source, target in ((0, 1), (1, 0)):
            assert_between(0.85 * rate, lambda s=source, t=target: two.measure(s, t, seconds=1).bits_per_s, 1.1 * rate)
    two.set_rate(None)
    assert_between(1e9, free, math.inf)


@pytest.mark.drawn(1, "limits")
def test_a_host_cannot_take_more_than_its_link_from_many(tmp_path: Path) -> None:
    (tmp_path / "take.py").write_text(
        "import socket, threading, time\n"
        "server, counts = socket.create_server(('', 6000)), []\n"
        "print('ready', flush=True)\n"
        "links = [server.accept()[0] for _ in range(2)]\n"
        "begin = time.monotonic()\n"
        "def take(link):\n"
        "    while time.monotonic() < begin + 2:\n"
        "        counts.append((time.monotonic(), len(link.recv(65536))))\n"
        "threads = [threading.Thread(target=take, args=(link,)) for link in links]\n"
        "[thread.start() for thread in threads], [thread.join() for thread in threads]\n"
        "print(sum(count for when, count in counts if when > begin + 1) * 8)\n"
    )
    (tmp_path / "send.py").write_text(
        "import socket\nlink = socket.create_connection(('host3', 6000))\nwhile True: link.sendall(bytes(65536))"
    )
    take, send = (f"{sys.executable} {tmp_path}/{name}.py" for name in ("take", "send"))
    with Hosts(count=3, rate="100mbit") as hosts:
        script = f"ssh host3 {take} | (read -r _; ssh -n host2 {send} & {send} & cat)"
        command = ["bash", "-c", script]
        assert_between(0.8 * 100e6, lambda: float(hosts.run(command, timeout=30).check().stdout), 1.05 * 100e6)


@pytest.mark.drawn(1, "limits")
def test_ranks_can_change_the_limits(two: Hosts) -> None:
    result = two.run([*TOOL, "--set-rate", "300mbit"], timeout=60).check()
    assert two.rates == ["300mbit", "300mbit"]
    assert_between(0, lambda: two.measure().bits_per_s, 1.2 * 300e6)
    result = two.run([*TOOL, "--set-rate", "fast"], timeout=60)
    assert result.returncode == 2 and "rate 'fast': allowed" in result.stderr
    with pytest.raises(RuntimeError, match="not run on a host"):
        ask_rate("1gbit")


@pytest.mark.drawn("hosts")
def test_environment_and_arguments_reach_ranks_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "rank, folder, *words = os.environ['RANK'], *sys.argv[1:]\n"
        "text = '|'.join([os.uname().nodename, os.environ['LOCAL_SIZE'], os.environ['GREETING'], *words])\n"
        "pathlib.Path(folder, rank).write_text(text)\n"
    )
    words = ["", "what is it?", "a'b", 'say "hi" for $HOME `x`', "a;b", "*", "back\\slash here"]
    with Hosts(count=2, slots=1, env={"GREETING": "good day; you"}) as hosts:
        hosts.run_deepspeed(script, tmp_path, *words, timeout=120).check()
        for rank in range(2):
            said = (tmp_path / str(rank)).read_text().split("|")
            assert said == [f"host{rank + 1}", "1", "good day; you", *words]
        with pytest.raises(ValueError, match="100%n"):
            hosts.start_deepspeed(script, "100%n")
        with pytest.raises(ValueError, match="GREETING"):
            hosts.start_deepspeed(script, env={"GREETING": "$HOME"})


@pytest.mark.drawn("hosts")
def test_failure_time_out_and_leftovers(two: Hosts) -> None:
    result = two.run(["bash", "-c", "echo out; echo err >&2; ssh host2 exit 7"], timeout=30)
    assert (result.returncode, result.stdout, result.stderr, result.leftovers) == (7, "out\n", "err\n", [])
    result = two.run(["ssh", "host2", "sleep", "1000"], timeout=2)
    assert result.returncode is None and 2 <= result.seconds and two.processes() == []
    result = two.run(["ssh", "host2", "setsid sleep 1000 >/dev/null 2>&1 </dev/null &"], timeout=30)
    assert result.returncode == 0 and ["sleep 1000" in line for line in result.leftovers] == [True]
    assert two.processes() == []
    first = two.start(["sleep", "1000"])
    with pytest.raises(RuntimeError, match="one at a time"):
        two.start(["true"])
    first.kill()
    two.run(["true"], timeout=10).check()


def test_two_at_once_do_not_see_each_other(two: Hosts) -> None:
    with Hosts(count=2, rate="100mbit") as other:
        two.start(["ssh", "host2", "sleep", "1000"])
        assert other.run(["ssh", "host2", "pgrep -x sleep"], timeout=30).returncode == 1
        assert_between(0, lambda: other.measure().bits_per_s, 1.2 * 100e6)
        assert two.processes(1)
        # What has measured may have ended, and its parent not seen it yet.
        assert not [process for process in other.processes() if process.status() != psutil.STATUS_ZOMBIE]


def test_nothing_stays_after_the_block_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_here() -> set[str]:
        # Other tests, and browsers, make namespaces meanwhile.
        here = psutil.Process()
        return namespaces(here.children(recursive=True)) - namespaces([here])

    with pytest.raises(ZeroDivisionError), Hosts(count=2) as hosts:
        running = hosts.start(STAY)
        await_lines(lambda: running.stdout, 3)
        made = made_here()
        assert len(made) == 6
        raise ZeroDivisionError
    hosts.close()
    await_gone(made)
    assert not hosts.folder.exists() and hosts.processes() == []

    def fail(*_: object) -> None:
        made.update(made_here())
        raise RuntimeError("no links today")

    made.clear()
    monkeypatch.setattr(cluster, "Links", fail)
    hosts = Hosts(count=2)
    with pytest.raises(RuntimeError, match="no links today"):
        hosts.__enter__()
    assert len(made) == 4
    await_gone(made)
    assert not hosts.folder.exists()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_stays_after_a_signal(tmp_path: Path, number: signal.Signals, status: int) -> None:
    out = tmp_path / "out"
    with open(out, "wb") as file:
        tool = subprocess.Popen([*TOOL, "--", *STAY], stdout=file, env={**os.environ, "TMPDIR": str(tmp_path)})
    names = set(await_lines(out.read_text, 3))
    assert names <= namespaces()
    tool.send_signal(number)
    assert status_within(END_S, tool) == status
    await_gone(names)
    # What cannot be caught leaves a folder; processes and networks go in any case.
    assert number == signal.SIGKILL or [path.name for path in tmp_path.iterdir()] == ["out"]


def test_wrong_settings_are_named() -> None:
    assert [parse_rate(rate) for rate in ("1gbit", "2.5Gbit", "250m", "1e9", None)] == [1e9, 2.5e9, 250e6, 1e9, None]
    for rate in ("fast", "", "-1gbit", "1 gbyte", "10"):
        with pytest.raises(ValueError, match=f"rate '{rate}'"):
            parse_rate(rate)
    with pytest.raises(ValueError, match="count = 0"):
        Hosts(count=0)
    with pytest.raises(ValueError, match="slots = 0"):
        Hosts(slots=0)
    with pytest.raises(ValueError, match="3 rates for 2 hosts"):
        Hosts(count=2, rate=["1gbit"] * 3)


def test_what_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools.unavailable() is None
    with monkeypatch.context() as patch:
        patch.setattr(tools.os, "geteuid", lambda: 1000)
        assert tools.unavailable() == "needs root, for network namespaces"
    with monkeypatch.context() as patch:
        patch.setattr(tools, "TRIAL", "echo no such thing >&2; exit 1")
        assert "privilege" in str(tools.unavailable()) and str(tools.unavailable()).endswith("no such thing")
    monkeypatch.setattr(tools, "search_path", lambda: "/nonexistent")
    assert "apt-get install --no-install-recommends" in str(tools.unavailable())
    assert "pdsh" in str(tools.unavailable())
    with pytest.raises(RuntimeError, match="hosts cannot be made on this machine: needs .*openssh-server"):
        Hosts().__enter__()
