"""A headless Chromium, spoken to over a pipe by its own protocol, without any package."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tests.patience import Patience

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 120.0


def find_browser() -> str | None:
    """A browser on the PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def _pipe() -> tuple[int, int]:
    """One whose ends are none of the descriptors that the browser wants."""
    ends = os.pipe()
    found = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return found[0], found[1]


class Browser:
    """One page in a ``with``."""

    def __init__(self, program: str):
        self._program = program
        self._number, self._held = 0, b""
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="megakv-browser-", ignore_cleanup_errors=True)
        to_read, self._write = _pipe()
        self._read, to_write = _pipe()
        command = [self._program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "--no-first-run", "about:blank"]
        # The browser reads commands from descriptor 3, and writes to 4.
        shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=[to_read, to_write],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        targets = self._call("Target.getTargets", None)["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._call("Target.attachToTarget", None, targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable", self._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._folder.cleanup()

    def size(self, width: int, height: int = 900) -> None:
        """Show the page in a window of so many pixels."""
        values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", self._session, **values)

    def open(self, url: str) -> None:
        self._call("Page.navigate", self._session, url=url)

    def run(self, script: str) -> Any:
        """What an expression of the page comes to."""
        values = self._call("Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in values, values
        return values["result"].get("value")

    def wait_for(self, script: str, seconds: float = WAIT_S) -> Any:
        """An expression's value, once it is true."""
        patience = Patience(seconds)
        while not (value := self.run(script)):
            assert not patience.over, (script, self.errors, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def _call(self, method: str, session: str | None, **values: Any) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": values} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._held:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser has ended"
            self._held += more
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        """Errors of scripts, and what the page's policy forbade."""
        text: Callable[[Any], str] = json.dumps
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(text(event["params"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(text(event["params"]["entry"]))
