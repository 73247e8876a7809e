"""A page in headless Chromium, driven over its DevTools pipe: what it asks for, what it says, how it looks.

Notable: no driver and no socket; messages are JSON that ends with a NUL on file descriptors 3 (in) and 4 (out).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; Debian's package is chromium")
PATIENCE = 60.0
"""Seconds that an answer may take."""


class Browser:
    """One page of a Chromium process; events are kept in the order of their arrival."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._last, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            received = self._receive()
            if received.get("id") == self._last:
                assert "error" not in received, f"{method}: {received['error']}"
                return received["result"]
            self.events.append(received)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium said nothing for {PATIENCE:g} s"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def attach(self) -> None:
        """Take a blank page and listen to its console, its log and its requests."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Load a file in a window of this width (CSS pixels), and wait for it."""
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + PATIENCE
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < until, "the page did not load"
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, the log and scripts since the page was opened."""
        found = []
        for event in self.events:
            method, told = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"].get("exception", told["exceptionDetails"])))
            elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                found.append(str(told["args"]))
            elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(told["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, the page itself left out."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked[1:] if not url.startswith("data:")]

    def screenshot(self, path: Path) -> Path:
        """Write the whole page as a PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))
        return path


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """A Chromium process of its own, ended with the block.

    Args:
        profile: an empty folder for what it writes.
    """
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
        "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands_out, answers_in)]  # clear of 3 and 4

    def place_pipes() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        command, preexec_fn=place_pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for end in high:
        os.close(end)
    os.close(commands_out)
    os.close(answers_in)
    browser = Browser(commands_in, answers_out)
    try:
        browser.attach()
        yield browser
        browser._session = None
        browser.send("Browser.close")
    finally:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(commands_in)
        os.close(answers_out)
