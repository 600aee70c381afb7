"""A real browser, driven over a pipe by its own protocol (DevTools): no driver, no socket, nothing to install but it.

The browser reads commands from its file 3 and answers on its file 4: JSON, each message ended by a zero byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Browsers in tests only read files: no name resolves, and background services are off.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-default-apps", "--disable-extensions", "--disable-domain-reliability",
    "--no-first-run", "--no-default-browser-check", "--metrics-recording-only", "--force-color-profile=srgb",
    "--lang=en", "about:blank",
)  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
# Generous, because a loaded machine is slow.
PATIENCE = 60.0


class BrowserError(Exception):
    """The browser refused a command, is gone, or a page raised."""


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _beyond_four(descriptor: int) -> int:
    """Duplicates the file to a descriptor other than 3 and 4, which are the browser's pipes."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


class Browser:
    """One browser process. Each page has a separate context, so pages share nothing."""

    def __init__(self, command: str, home: Path) -> None:
        its_input, self._input = (_beyond_four(one) for one in os.pipe())
        self._output, its_output = (_beyond_four(one) for one in os.pipe())
        log = (os.POSIX_SPAWN_OPEN, 2, str(home / "stderr"), os.O_WRONLY | os.O_CREAT, 0o600)
        ends = ((os.POSIX_SPAWN_DUP2, its_input, 3), (os.POSIX_SPAWN_DUP2, its_output, 4))
        self._pid = os.posix_spawn(
            command,
            [command, *FLAGS, f"--user-data-dir={home / 'profile'}"],
            {**os.environ, "HOME": str(home)},
            file_actions=[log, *ends],
            setpgroup=0,
        )
        os.close(its_input)
        os.close(its_output)
        self._home, self._rest, self._number = home, b"", 0
        self.events: list[Message] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> Message:
        self._number += 1
        number = self._number
        message: Message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._input, json.dumps(message).encode() + b"\0")
        answer = self.listen(lambda reply: reply.get("id") == number, f"an answer to {method}")
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: Message = answer["result"]
        return result

    def wait(self, method: str, wanted: Callable[[Message], bool] = lambda params: True) -> Message:

        def fits(message: Message) -> bool:
            return message.get("method") == method and wanted(message["params"])

        event_found = next((event for event in self.events if fits(event)), None) or self.listen(fits, method)
        params: Message = event_found["params"]
        return params

    def listen(self, fits: Callable[[Message], bool], what: str) -> Message:
        end = time.monotonic() + PATIENCE
        while True:
            message = self._read(end, what)
            if "method" in message:
                self.events.append(message)
            if fits(message):
                return message

    def _read(self, end: float, what: str) -> Message:
        while b"\0" not in self._rest:
            if not select.select([self._output], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError(f"the browser did not give {what} within {PATIENCE:.0f} s")
            more = os.read(self._output, 1 << 20)
            if not more:
                raise BrowserError(f"the browser ended: {(self._home / 'stderr').read_text(errors='replace')[-2000:]}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """Kills the browser and everything it started, by process group."""
        os.close(self._input)
        os.close(self._output)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


@dataclass
class Tab:
    """One page in a separate context, with all its messages."""

    browser: Browser
    context: str
    session: str
    downloads: Path
    domains: tuple[str, ...] = field(default=("Page", "Runtime", "Log", "Network"))

    @classmethod
    def open(cls, browser: Browser, downloads: Path) -> Tab:
        context = browser.send("Target.createBrowserContext")["browserContextId"]
        target = browser.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = cls(browser, context, session, downloads)
        for domain in tab.domains:
            tab.send(f"{domain}.enable")
        tab.send("Page.setLifecycleEventsEnabled", enabled=True)
        browser.send(
            "Browser.setDownloadBehavior",
            behavior="allow",
            browserContextId=context,
            downloadPath=str(downloads),
            eventsEnabled=True,
        )
        return tab

    def send(self, method: str, **params: Any) -> Message:
        return self.browser.send(method, self.session, **params)

    def heard(self, method: str) -> list[Message]:
        return [
            event["params"]
            for event in self.browser.events
            if event["method"] == method and event.get("sessionId") == self.session
        ]

    def go(self, url: str) -> None:
        """Loads an address and waits for that page's load event; an earlier page's event may arrive late."""
        loader = self.send("Page.navigate", url=url)["loaderId"]
        self.browser.wait("Page.lifecycleEvent", lambda told: (told["loaderId"], told["name"]) == (loader, "load"))

    def run(self, expression: str) -> Any:
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (value := self.run(expression)):
            if time.monotonic() > end:
                raise BrowserError(f"never came true: {expression}")
            time.sleep(0.02)
        return value

    def resize(self, width: int, height: int = 900) -> None:
        """A narrow window emulates a telephone."""
        phone = width < 500
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)

    def media(self, kind: str, scheme: str = "light") -> None:
        """'screen' or 'print'; 'light' or 'dark'."""
        self.send(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def click(self, selector: str) -> None:
        x, y = self._middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _middle(self, selector: str) -> tuple[float, float]:
        """The middle of an element after scrolling has settled, which takes two frames."""
        x, y = self.run(
            f"""(async () => {{
                const found = document.querySelector({json.dumps(selector)});
                found.scrollIntoView({{ block: "center", behavior: "instant" }});
                const frame = () => new Promise(requestAnimationFrame);
                await frame(); await frame();
                const box = found.getBoundingClientRect();
                return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        return x, y

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text)

    def write(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def close(self) -> None:
        self.browser.send("Target.disposeBrowserContext", browserContextId=self.context)
