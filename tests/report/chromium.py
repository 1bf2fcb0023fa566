"""A headless Chromium driven through its DevTools protocol over two pipes; no other package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip
_LIMIT = 60.0


def find_chromium() -> str | None:
    """The browser of this machine; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own.

    Attributes:
        complaints: console messages, exceptions and refused loads since the last `open`.
    """

    def __init__(self, program: str, profile: Path) -> None:
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()

        def place_pipes() -> None:
            # the protocol is spoken on descriptors 3 and 4; keep both clear of each other first
            read, write = os.dup(to_child), os.dup(from_child)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=place_pipes, pass_fds=(3, 4, to_child, from_child),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._count, self._buffer, self._session = 0, b"", ""
        self._seen: list[str] = []
        self.complaints: list[str] = []
        self._attach()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(
        self, page: Path, *, width: int = 1200, dark: bool = False, script: bool = True
    ) -> None:
        """Load a file."""
        self.complaints, self._seen = [], []
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._receive()

    def value(self, expression: str) -> Any:
        """What a script of the page gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """One key, down and up."""
        names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **names)
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def screenshot(self, target: Path) -> None:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, target: Path) -> None:
        """The page as it prints."""
        printed = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        target.write_bytes(base64.b64decode(printed["data"]))

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _LIMIT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], deadline - time.monotonic())
            piece = os.read(self._from, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("the browser does not answer")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method", ""), message.get("params", {})
        self._seen.append(method)
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded",
                      "Page.javascriptDialogOpening"):  # fmt: skip
            self.complaints.append(f"{method}: {json.dumps(parameters)[:500]}")
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith("file:"):
                self.complaints.append(f"requested {url}")
