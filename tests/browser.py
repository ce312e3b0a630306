"""A headless Chromium that tests look at pages with, by its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.meta.sources import ROOT

DEADLINE_S = 60.0
"""For the start, and for each answer."""


class Tab:
    """One page: commands, and the events that came with their answers."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number, self._session = connection, 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._connection.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = json.loads(self._connection.recv(timeout=DEADLINE_S))
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, file: Path, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Load a file in a window of that size, and wait until it is drawn."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=file.as_uri())
        ends = time.monotonic() + DEADLINE_S
        while self.value("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < ends, "the page did not load"
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, expression: str) -> Any:
        """Value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Write what the window shows, as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def params(self, *methods: str) -> list[dict[str, Any]]:
        """Parameters of the events of these methods since the page was opened."""
        return [item["params"] for item in self.events if item.get("method") in methods]


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """Install a browser if there is none yet, and start it."""
    done = subprocess.run([ROOT / "ci" / "chromium"], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    folder = done.stdout.strip()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        own = {"LD_LIBRARY_PATH": f"{folder}/lib", "FONTCONFIG_FILE": f"{folder}/fonts.conf", "HOME": home}
        process = subprocess.Popen(
            [f"{folder}/chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-zygote", "--hide-scrollbars",
             "--remote-debugging-port=0", f"--user-data-dir={home}", "about:blank"],
            env=os.environ | own,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"ws://\S+", line) for line in process.stderr)), None)
            assert found, f"the browser ended by itself: exit status {process.wait(DEADLINE_S)}"
            with connect(found[0], max_size=None, open_timeout=DEADLINE_S, proxy=None) as connection:
                yield Tab(connection)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)


def require_quiet(tab: Tab, file: Path) -> None:
    """Assert that the page that was opened asks for no other file, and complains of nothing."""
    tab.call("Runtime.evaluate", expression="1")  # whatever the page caused has been told by now
    asked = [item["request"]["url"] for item in tab.params("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    assert tab.params("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []
    assert tab.params("Page.javascriptDialogOpening") == []
