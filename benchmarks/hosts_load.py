"""Clients of `make e2e-hosts` and `make e2e-compose`: labelled digits, evenly paced, by the unmodified tritonclient.
With certificates it is mutual TLS, without any clear text.

`python -m benchmarks.hosts_load --target HOST:PORT --rate 100 [--ca, --certificate, --key, --token-file]` sends until
SIGTERM, never again what failed, and prints a JSON line of sums twice a second and one at its end. From SIGUSR1 on it
sends at --rate-later.
"""

import argparse
import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from trefoil.core.units import ms
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
CONNECTIONS: Final = 4
DEADLINE_S: Final = 120.0  # a busy machine may stand still for long; what is counted is whether they are answered
WAIT_FOR_READY: Final = '{"methodConfig": [{"name": [{}], "waitForReady": true}]}'
IMAGES: Final = Path(__file__).resolve().parents[1] / "model_repository" / "digits" / "heldout.npz"


class Clients:
    """Some connections, and what came of all requests."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        secure = {}
        if arguments.ca:
            files = (arguments.ca, arguments.key, arguments.certificate)
            secure = dict(zip(("root_certificates", "private_key", "certificate_chain"), files, strict=True))
        options = [("grpc.service_config", WAIT_FOR_READY)] if arguments.wait_for_ready else None
        self._clients = [
            triton.InferenceServerClient(arguments.target, ssl=bool(secure), **secure, channel_args=options)
            for _ in range(CONNECTIONS)
        ]
        token = Path(arguments.token_file).read_text().strip() if arguments.token_file else ""
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        with np.load(IMAGES) as data:
            self._images, self._labels = data["images"], data["labels"]
        self.sent = self.answered = self.correct = 0
        self.slices: Counter[str] = Counter()
        self.variants: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.latencies_ms: list[float] = []

    async def ask(self, index: int, due_s: float) -> None:
        """Send one image and count its answer."""
        self.sent += 1
        row = index % len(self._images)
        tensor = triton.InferInput("IMAGE", [1, 8, 8], "UINT8")
        tensor.set_data_from_numpy(self._images[row : row + 1])
        try:
            answer = await self._clients[index % CONNECTIONS].infer(
                "digits", [tensor], client_timeout=DEADLINE_S, headers=self._headers,
                parameters={"trefoil_receipt": "true"},
            )  # fmt: skip
            scores = answer.as_numpy("PROBABILITIES")
        except InferenceServerException as error:
            self.failed[str(error.status())] += 1
            if sum(self.failed.values()) == 1:
                print(f"the first that failed: {error.message()}", flush=True)
            return
        if scores is None or scores.shape != (1, 10):
            self.failed["BAD_ANSWER"] += 1
            return
        told: Any = answer.get_response().parameters
        self.latencies_ms.append(ms(CLOCK.monotonic_s() - due_s))
        self.answered += 1
        self.correct += int(scores.argmax() == self._labels[row])
        self.slices[told["trefoil_slice"].string_param] += 1
        self.variants[told["trefoil_variant"].string_param] += 1

    def tell(self, *, latency: bool = False) -> None:
        """Print all sums; with quantiles of the latency, counted from when a request was due."""
        sums = {name: getattr(self, name) for name in ("sent", "answered", "correct", "slices", "variants", "failed")}
        if latency and self.latencies_ms:
            sums["latency_ms"] = {f"p{q:g}": float(np.percentile(self.latencies_ms, q)) for q in (50, 95, 99, 100)}
        print(json.dumps(sums), flush=True)

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.close()


async def send(arguments: argparse.Namespace) -> None:
    """Send at the rate until SIGTERM; a request leaves at its time whatever happened to those before it."""
    stop, later = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, later.set)
    clients = Clients(arguments)
    began_s, told = CLOCK.monotonic_s(), 0
    async with asyncio.TaskGroup() as requests:
        index, due_s = 0, began_s
        while not stop.is_set():
            await CLOCK.sleep(max(0.0, due_s - CLOCK.monotonic_s()))
            requests.create_task(clients.ask(index, due_s))
            index += 1
            due_s += 1.0 / (arguments.rate_later if later.is_set() else arguments.rate)
            if (half := int(2 * (CLOCK.monotonic_s() - began_s))) > told:
                told = half
                clients.tell()
    clients.tell(latency=True)
    await clients.close()


def main() -> None:
    """Parse the command line and send."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--rate-later", type=float, default=0.0)
    for name in ("--ca", "--certificate", "--key", "--token-file"):
        parser.add_argument(name, default="")
    parser.add_argument("--wait-for-ready", action="store_true", help="what was not sent waits for a connection")
    asyncio.run(send(parser.parse_args()))


if __name__ == "__main__":
    main()
