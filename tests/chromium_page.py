"""A headless Chromium and one page in it, driven over its debugging socket."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_PATIENCE_SECONDS = 60


def find_browser() -> str | None:
    """Path of a Chromium, or ``None``."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser(binary: str) -> Iterator[Browser]:
    """Start a browser with a profile of its own; it ends with the block."""
    profile = tempfile.mkdtemp(prefix="atom-browser-")
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    process = subprocess.Popen(
        [binary, *_FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Browser(_address(process, Path(profile) / "DevToolsActivePort"))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def _address(process: subprocess.Popen[bytes], file: Path) -> str:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended with code {process.returncode}")
        lines = file.read_text().splitlines() if file.is_file() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise RuntimeError("the browser opened no debugging port")


class Browser:
    """One page. What it says on its console and asks of a network is kept.

    Attributes:
        complaints: console errors, warnings and uncaught exceptions since the latest ``open``.
        requested: addresses that the page asked for since the latest ``open``.
    """

    def __init__(self, address: str) -> None:
        # comes with jupyter, which has no types for it
        websocket = importlib.import_module("websocket")
        self._socket = websocket.create_connection(
            address, timeout=_PATIENCE_SECONDS, suppress_origin=True, max_size=None
        )
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the debugging protocol."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        message = dict(json.loads(self._socket.recv()))
        name, about = message.get("method"), message.get("params", {})
        if name == "Page.loadEventFired":
            self._loaded = True
        elif name == "Network.requestWillBeSent":
            self.requested.append(about["request"]["url"])
        elif name == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.complaints.append(str(about["args"]))
        elif name == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(about["entry"]))
        return message

    def open(self, page: Path, suffix: str = "", *, width: int = 1200) -> None:
        """Load a page from disk and wait until it is complete.

        Args:
            page: its file.
            suffix: query and fragment.
            width: of the window, in pixels.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        # a page that only gets another fragment would not load again
        self._go("about:blank")
        self.complaints.clear()
        self.requested.clear()
        self._go(page.resolve().as_uri() + suffix)

    def _go(self, address: str) -> None:
        self._loaded = False
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._read()

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def focus(self, selector: str) -> None:
        """Move the keyboard's focus to an element."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")

    def press(self, key: str, text: str = "") -> None:
        """Press and release one key, e.g. ``Enter`` with the text ``\\r``, or ``Tab``."""
        codes = {"Enter": 13, "Tab": 9, " ": 32, "ArrowDown": 40}
        code = codes.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        for letter in text:
            self.press(letter, letter)
