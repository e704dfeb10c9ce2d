"""What the machine must have for hosts to be made on it."""

from __future__ import annotations

import os
import shutil
import subprocess

# Debian's and Ubuntu's names.
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "pdsh": "pdsh",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "bash": "bash",
}
# In one throw-away set of namespaces: all that hosts and links are made of.
TRIAL = """
hostname trial
mount -t tmpfs tmpfs /dev/shm
ip link add name trial0 type veth peer name trial1
ip link add name trial2 type bridge
tc qdisc add dev trial0 root tbf rate 1gbit burst 32kb latency 50ms
"""


def search_path() -> str:
    """PATH with the folders of system tools, which not every shell has there."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def find(tool: str) -> str:
    """Where a tool of `PACKAGES` lies.

    Raises
    ------
    RuntimeError
        If it is not there: the package to install.
    """
    path = shutil.which(tool, path=search_path())
    if path is None:
        raise RuntimeError(f"{tool} is not installed (Debian, Ubuntu: apt-get install {PACKAGES[tool]})")
    return path


def unavailable() -> str | None:
    """Why hosts cannot be made on this machine, and what would help; None if they can."""
    missing = sorted({package for tool, package in PACKAGES.items() if not shutil.which(tool, path=search_path())})
    if missing:
        install = f"apt-get install --no-install-recommends {' '.join(missing)}"
        return f"needs {', '.join(missing)}, as root on Debian or Ubuntu: {install}"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    trial = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "bash", "-ec", TRIAL],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": search_path()},
    )
    if trial.returncode:
        said = (trial.stderr or trial.stdout).strip().splitlines() or [f"exit status {trial.returncode}"]
        return f"needs the privilege to make network namespaces, and veth, bridge and tbf in the kernel: {said[-1]}"
    return None
