"""ssh between hosts, with keys and settings of its own in a folder that goes with them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.hosts.tools import find

SERVER = """\
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
PermitUserRC no
PrintMotd no
MaxStartups 100
"""
CLIENT = """\
Host *
    User root
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
    LogLevel ERROR
"""
# sshd refuses accounts that are locked, as root is on many machines.
SHADOW = "root:*:20000:0:99999:7:::\nsshd:*:20000:0:99999:7:::\n"
# For the set-up of a host. Expects $folder, and $sshd: it wants its absolute path.
START = """\
[ ! -e /etc/shadow ] || mount --bind "$folder/shadow" /etc/shadow
"$sshd" -D -e -f "$folder/sshd_config" </dev/null >>"$folder/sshd.log" 2>&1 &
until (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null; do
    kill -0 $! 2>/dev/null || { cat "$folder/sshd.log"; exit 1; }
    sleep 0.02
done
"""


def prepare(folder: Path) -> None:
    """Write keys, settings, and in ``bin`` an ssh that uses them, into an empty folder that only root can read."""
    generate = [find("ssh-keygen"), "-q", "-t", "ed25519", "-N", ""]
    for name in ("host_key", "user_key"):
        subprocess.run([*generate, "-C", name, "-f", folder / name], check=True)
    (folder / "known_hosts").write_text(f"* {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(SERVER.format(folder=folder))
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder))
    (folder / "shadow").write_text(SHADOW)
    client = folder / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {find("ssh")} -F {folder}/ssh_config "$@"\n')
    client.chmod(0o755)
    # The one thing outside the folder: sshd does not start without it.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
