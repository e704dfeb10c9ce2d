"""Where the server listens, who may ask, and how much one may ask for."""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import re
import resource
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LEAST_KEY = 16
"""Characters of an API key, below which it can be guessed."""
MOST_KEYS = 1024
KEY = re.compile(r"[\x21-\x7e]+")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@,\x7f-\U0010ffff]+")


@dataclass(frozen=True)
class ApiKeys:
    """Keys by their digests: a comparison takes as long whatever was sent."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, path: str) -> ApiKeys:
        """Of a file with a key in every line; those that begin with ``#`` are comments."""
        source = f"--api-key-file {path}"
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} cannot be read: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        for number, key in enumerate(keys, 1):
            if len(key) < LEAST_KEY or not KEY.fullmatch(key):
                raise ValueError(
                    f"{source}: key {number} of it: allowed: {LEAST_KEY} or more printable ASCII characters, no spaces"
                )
        if not 1 <= len(keys) <= MOST_KEYS:
            raise ValueError(f"{source} has {len(keys)} keys: allowed: 1 to {MOST_KEYS}, one a line")
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    def owner(self, given: str) -> int | None:
        """The number of a key, in the file's order; None if it is none of them."""
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for number, known in enumerate(self.digests):
            if hmac.compare_digest(digest, known):
                found = number
        return found


@dataclass(frozen=True)
class HttpSettings:
    """Of a server; a ValueError names the one that cannot be."""

    model: str
    """The name under which the model is asked for."""
    host: str = "127.0.0.1"
    port: int = 8000
    keys: ApiKeys = ApiKeys()
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 8 << 10
    max_connections: int = 1024
    max_new_tokens: int = 4096
    """Tokens of an answer at most."""
    max_choices: int = 16
    """Answers of one call at most: `n` times its prompts."""
    stall_s: float = 30.0
    """How long a client may send or read nothing while it is its turn."""
    strict_model: bool = False
    """Whether requests for a model of another name are refused."""
    origins: tuple[str, ...] = ()
    """Those of pages of other sites that may ask; ``*`` for all."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_header_bytes", "max_connections", "max_new_tokens", "max_choices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: allowed: whole numbers from 1")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port {self.port}: allowed: 0 (any that is free) to 65535")
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"--allow-origin {origin}: allowed: https://HOST, http://HOST:PORT and the like, or *")
        if "*" in self.origins and not self.keys.digests:
            raise ValueError(
                "--allow-origin * without --api-key-file: any page that is open on this machine could use the model; "
                "name the pages' origins, or give a file of keys"
            )
        if not self.keys.digests and not self.local:
            raise ValueError(
                f"--host {self.host} without --api-key-file: whoever reaches this host could use the model; give a "
                "file of keys, or --host 127.0.0.1"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_local(self.host)


def is_local(host: str) -> bool:
    """Whether a name is this machine's alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def names_this_machine(authority: Iterable[str]) -> bool:
    """Whether a request's ``Host`` is that of a server which only this machine reaches."""
    return all(is_local(re.sub(r":\d*$", "", name)) for name in authority)


SEND_BYTES = 256 << 10
OTHER_FILES = 256
"""Files that a rank has open beside clients' connections."""


def listening_socket(settings: HttpSettings) -> socket.socket:
    """Where the server listens; a ValueError where it cannot."""
    _allow_files(settings.max_connections)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # What the kernel holds for a client that reads slowly is bounded too.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            # The kernel gives up connections whose clients take nothing: what was written to them would stay for ever.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2e3 * settings.stall_s))
            listener.bind(address)
            listener.listen(settings.max_connections)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "another port, or 0 for any that is free" if taken else "an address of this host, or its name"
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--host {settings.host} --port {settings.port}: cannot listen there: {why}; give {advice}"
        ) from error
    return listener


def _allow_files(connections: int) -> None:
    """Raise this process's limit of open files where that is needed; a ValueError where it cannot be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_FILES
    if needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"--max-connections {connections}: this process may have {hard} files open (ulimit -Hn), of which "
            f"{OTHER_FILES} are the server's own; allowed: up to {max(hard - OTHER_FILES, 0)}, or more after raising "
            "that limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
