"""Engine that already runs on a device, in the place of a slice's Triton: asked as a `TritonClient` asks, and woken and
put to sleep by its own commands. Nothing else starts or ends it.
"""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tritonclient.grpc.model_config_pb2 import ModelConfig

from power_agent.runtimes.base import RunningTriton
from power_agent.settings import EngineSettings, PowerAgentSettings
from power_agent.triton.client import StubDead, TritonClient, TritonUnready, VersionCounters
from trefoil.core.device_types import engine_slice
from trefoil.core.errors import StartError
from trefoil.core.fleet import Hosted, SliceKey
from trefoil.engine_api import EMBED, EngineClient, EngineError, EngineTarget, TritonTarget
from trefoil.runtime.clock import Clock
from trefoil.runtime.given.llm_backends import LLM_FILES, OPENAI, TRITON, embeds, engine_model
from trefoil.runtime.given.repository_names import boundary
from trefoil.runtime.model_files import contract
from trefoil.runtime.security.key_file import KeyFile

POLL_S: Final = 0.5
PROBE_S: Final = 30.0
"""Longest wait for an inference of a probe, which may be behind others."""
KEY_FILE: Final = "engines.key_file"
PASSED_ON: Final = ("PATH", "HOME", "LANG", "TMPDIR")
"""Of the agent's environment, to commands."""
OUTPUT_CHARS_MAX: Final = 300


class AdoptedEngine:
    """Engine of one slice. Belongs to one event loop."""

    def __init__(
        self, settings: EngineSettings, target: EngineTarget | TritonTarget, hosted: Hosted, clock: Clock,
        key: KeyFile | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self._settings, self._hosted, self._clock = settings, hosted, clock
        self._client = EngineClient(key=key)

    async def wait_ready(self, hosted: Sequence[Hosted], timeout_s: float) -> None:
        """Wait for a token; one that no command wakes has to give it at once.

        Raises:
            TritonUnready: it does not.
        """
        until_s = self._clock.monotonic_s() + self._settings.command_timeout_s
        while True:
            try:
                await self.probe(self._hosted.model, self._hosted.version, timeout_s)
                return
            except TritonUnready:
                if not self._settings.wake or self._clock.monotonic_s() >= until_s:
                    raise
            await self._clock.sleep(POLL_S)

    async def probe(self, family: str, version: int, timeout_s: float = 0.0) -> None:
        """Have one token answered. Its patience is that of every stream: a probe may wait behind others.

        Raises:
            StubDead: nothing listens there.
            TritonUnready: it gives none.
        """
        assert isinstance(self.target, EngineTarget)
        try:
            await self._client.probe(self.target)
        except EngineError as error:
            raise (StubDead if error.kind == "unreachable" else TritonUnready)(str(error)) from error

    async def heal(self, hosted: Hosted, timeout_s: float) -> None:
        """Wait until it answers again; raises TritonUnready."""
        await self.wait_ready((hosted,), timeout_s)

    def has_processes(self, family: str) -> bool:
        """No process of it is this agent's."""
        return False

    async def statistics(self) -> tuple[VersionCounters, ...]:
        """Counters of its one version, which stay 0: it is busy while dispatchers have requests on it."""
        return (VersionCounters(self._hosted.model, self._hosted.version, 0, 0, 0, 0),)

    async def pending(self) -> int:
        """Number of requests that wait inside: dispatchers give it no more than it takes."""
        return 0

    async def close(self) -> None:
        """Close the connection; the engine continues."""
        await self._client.close()


class AdoptedTriton(AdoptedEngine):
    """Triton that already runs on a device. No model of it is loaded or unloaded."""

    def __init__(
        self, settings: EngineSettings, target: TritonTarget, hosted: Hosted, clock: Clock, contract_: ModelConfig
    ) -> None:
        super().__init__(settings, target, hosted, clock)
        self._triton = TritonClient(target.address, "", Path(), clock)
        self._config = ModelConfig()
        self._config.CopyFrom(contract_)
        self._config.name = target.model

    async def probe(self, family: str, version: int, timeout_s: float = 0.0) -> None:
        """Have one inference answered, which alone proves a model."""
        await self._triton.infer(self._config, 0, PROBE_S)

    async def close(self) -> None:
        """Close the connection; the Triton continues."""
        await super().close()
        await self._triton.close()


class AdoptedEngines:
    """Engines of a node, by its settings. Raises SettingError for a key file that cannot be used."""

    def __init__(self, settings: PowerAgentSettings, clock: Clock) -> None:
        self._node, self._settings, self._clock = settings.node, settings, clock
        self._keys = {each.key_file: KeyFile(each.key_file, KEY_FILE) for each in settings.engines if each.key_file}

    def on(self, key: SliceKey) -> EngineSettings | None:
        """Engine of a slice; None for every other slice."""
        engine = self._settings.engine_on(key.device)
        return engine if engine and key.slice_type == engine_slice(engine.family, engine.variant) else None

    def process(self, key: SliceKey, tag: str) -> RunningTriton:
        """What is listed of an adopted one: it runs, until its probes say otherwise."""
        engine = self.on(key)
        return RunningTriton(tag, engine.address if engine else "", tag, engine is not None, None, 0.0)

    def engine(self, key: SliceKey, hosted: Sequence[Hosted]) -> AdoptedEngine:
        """Engine of a slice that hosts this.

        Raises:
            StartError: the settings have no such engine.
            CatalogError: its engine.json names no model.
        """
        settings = self.on(key)
        if settings is None or not hosted:
            raise StartError(f"no engine of the settings is on {key.device}", remedy="put it back into engines")
        source, family = self._settings.model_repository.absolute(), hosted[0].family
        path, config = source / family / str(hosted[0].version) / LLM_FILES[OPENAI], contract(source, family)
        model, task = engine_model(path, boundary(source, family)), EMBED if embeds(config) else ""
        if (config.backend == TRITON) != (settings.api == TRITON):
            remedy = f"write api = {json.dumps(TRITON if config.backend == TRITON else OPENAI)}"
            why = f"family {family} is of backend {config.backend}"
            raise StartError(why, field="engines.api", value=settings.api, remedy=remedy)
        if settings.api == TRITON:
            triton = TritonTarget(settings.address, model, family, hosted[0].version)
            return AdoptedTriton(settings, triton, hosted[0], self._clock, config)
        secret = self._keys[settings.key_file] if settings.key_file else None
        return AdoptedEngine(settings, EngineTarget(settings.address, model, task), hosted[0], self._clock, secret)

    async def wake(self, key: SliceKey, engine: AdoptedEngine) -> None:
        """Run the command that wakes it, unless it answers.

        Raises:
            StartError: the command fails.
        """
        settings = self.on(key)
        if settings is None or not settings.wake:
            return
        with suppress(TritonUnready):
            await engine.probe("", 0)
            return
        await _run(settings.wake, settings.command_timeout_s, "wake")

    async def sleep(self, key: SliceKey) -> None:
        """Run the command that puts it to sleep, if there is one; raises StartError."""
        settings = self.on(key)
        if settings is not None and settings.sleep:
            await _run(settings.sleep, settings.command_timeout_s, "sleep")


async def _run(argv: Sequence[str], timeout_s: float, field: str) -> None:
    """Run a command; what it leaves running, as an engine in the background, continues."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise _failed(f"cannot be run: {error}", field, argv, "name a program by its whole path") from error
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError as error:
            remedy = "raise engines.command_timeout_s, or fix the command"
            raise _failed(f"did not end within {timeout_s:g} s", field, argv, remedy) from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        output.seek(0)
        said = " ".join(output.read().decode("utf-8", "replace").split())[-OUTPUT_CHARS_MAX:]
    if process.returncode:
        remedy = "run it by hand as the agent's user, and fix it"
        raise _failed(f"exited with {process.returncode}: {said}", field, argv, remedy)


def _failed(why: str, field: str, argv: Sequence[str], remedy: str) -> StartError:
    return StartError(why, field=f"engines.{field}", value=argv[0], remedy=remedy)
