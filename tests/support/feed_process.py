"""The carbon feed as a separate process."""

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from tests.support.awake import Awake
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading
from trefoil.runtime import codec, rpc

TIMEOUT_S = 60


@dataclass
class FeedProcess:
    """Starts `python -m carbon_feed`, speaks to it. Its log is a file: a pipe that nobody reads fills and stops it."""

    folder: Path
    redis_url: str
    port: int
    settings: dict[str, object] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    async def start(self, **settings: object) -> None:
        lines = {
            "redis_url": self.redis_url,
            "cluster": "c",
            "admin_address": f"127.0.0.1:{self.port}",
            "metrics_address": "",
            "state_dir": self.folder / "feed",
            **self.settings,
            **settings,
        }
        arguments = [part for name, value in lines.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "carbon_feed", *arguments, stderr=log
            )

    async def ended(self) -> tuple[int, str]:
        """Exit code and log of a feed that ends."""
        assert self.process is not None
        code = await asyncio.wait_for(self.process.wait(), TIMEOUT_S)
        self.process = None
        return code, self._log.read_text()

    @property
    def _log(self) -> Path:
        return self.folder / "feed.log"

    async def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and log; a feed is gone within 5 s of SIGTERM."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        with Awake() as took:
            code, log = await self.ended()
        assert took.seconds < 5, f"still there after {took.seconds:.1f} s:\n{log}"
        print(f"the feed ended with {code}:\n{log}")  # shown where a test fails: it may have ended by itself
        return code, log

    async def ask(self, zone: str = "demo") -> CarbonReading:
        async with rpc.channel(f"127.0.0.1:{self.port}") as channel:
            stub = pb_grpc.CarbonFeedStub(channel)
            request = pb.GetManyRequest(zones=[zone])
            try:
                answer = await stub.GetMany(request, timeout=TIMEOUT_S, wait_for_ready=True)
            except rpc.grpc.aio.AioRpcError as error:
                raise rpc.error_of(error) from error
            if answer.missing:
                raise errors.Unavailable(answer.missing[0].why)
            reading = codec.from_proto(answer.readings[0])
            assert isinstance(reading, CarbonReading)
            return reading
