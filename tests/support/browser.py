"""A headless Chromium that a test drives, over the pipe of its DevTools protocol; only the Debian package."""

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
"""As root a container has no sandbox of its own."""
ANSWER_S = 60.0


class Page:
    """One page of the browser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._number, self._session = reader, writer, 0, ""
        self.errors: list[str] = []
        """What the page's console complained of, refusals of its policy too."""

    async def open(self, url: str, width: int, height: int = 1400) -> None:
        """Open an address in a window of this size."""
        target = (await self._ask("Target.createTarget", url="about:blank"))["targetId"]
        found = await self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        await self._ask("Log.enable")
        await self._ask("Runtime.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self._ask("Emulation.setDeviceMetricsOverride", **size)
        await self._ask("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Value of an expression in the page, as JSON has it."""
        found = await self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def until(self, script: str, timeout_s: float = ANSWER_S) -> Any:
        """Value of an expression, once it is true."""
        async with asyncio.timeout(timeout_s):
            while not (found := await self.value(script)):
                await asyncio.sleep(0.1)
        return found

    async def picture(self, path: Path) -> None:
        """Write what the window shows, as PNG."""
        shown = await self._ask("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shown["data"]))

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        asked |= {"sessionId": self._session} if self._session else {}
        self._writer.write(json.dumps(asked).encode() + b"\0")
        async with asyncio.timeout(ANSWER_S):
            while True:
                said = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if said.get("id") == self._number:
                    assert "error" not in said, said
                    return dict(said["result"])
                self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        if said.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        if said.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """A browser with a fresh profile in a folder, until the end of the block."""
    assert CHROMIUM is not None
    commands, answers = os.pipe(), os.pipe()

    def as_3_and_4() -> None:
        low, high = os.dup(commands[0]), os.dup(answers[1])  # first, as 3 or 4 may be among them
        os.dup2(low, 3)
        os.dup2(high, 4)

    argv = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    child = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        close_fds=False, preexec_fn=as_3_and_4, start_new_session=True,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    os.close(commands[0])
    os.close(answers[1])
    reader = asyncio.StreamReader(limit=2**26)
    reading, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers[0], "rb", 0)
    )
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(commands[1], "wb", 0)
    )
    try:
        yield Page(reader, asyncio.StreamWriter(transport, protocol, None, loop))
    finally:
        transport.close()
        reading.close()
        child.terminate()
        await child.wait()
