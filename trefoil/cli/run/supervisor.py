"""Supervisor, the process behind `trefoil up`: holds a launched system until it is stopped.

`up` starts it in a separate session and reads what it says from a pipe: lines of {"say"}, then {"ready"} or
{"error"}. Its own death is not an accident either: the kernel stops its services, and the next `up` or `down` sweeps.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO

from trefoil.cli.guarded import EXIT_ERROR
from trefoil.cli.run import processes
from trefoil.cli.run.launcher import Launcher, clean_up, first_answer
from trefoil.cli.run.scenario import System, load_system
from trefoil.cli.run.shutdown import ShutdownSignals, run_until_signal, uncancellable
from trefoil.cli.run.state_directory import StateLock, StatePaths
from trefoil.core.errors import StartError, TrefoilError, in_one_line, system_error
from trefoil.runtime.clock import WallClock
from trefoil.runtime.telemetry import LogStream

DOWN_DEADLINE_S: Final = 40.0


async def supervise(system: System, state_dir: Path, signals: ShutdownSignals, pipe: "Pipe") -> int:
    """Launch, report the first answer, and stay until a signal or until the node is dead.

    A real node need not answer at once: its Tritons may start for minutes, or wait for a plan to be pinned.
    """
    try:
        with in_one_line(str(state_dir)):
            async with Launcher(system, state_dir, say=pipe.say, kill_now=lambda: signals.kill_now) as launcher:
                answered_s: float | None = None
                try:
                    answered_s = await first_answer(launcher, WallClock())
                except StartError as error:
                    if launcher.failure or not system.fleet.real:
                        raise
                    pipe.say(str(error))
                assert launcher.launch is not None
                pipe.ready(launcher.launch.addresses["inference"], answered_s)
                await launcher.wait_for_failure()
                raise StartError(launcher.failure)
    except TrefoilError as error:
        pipe.error(str(error))
        return EXIT_ERROR


class Pipe:
    """Pipe to the user's `trefoil up`, while it listens; and to our own log."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._log = LogStream(1)

    def say(self, line: str) -> None:
        """Report a line of progress."""
        self._write({"say": line})

    def ready(self, inference: str, answered_s: float | None) -> None:
        """Report that the system is up, and since when it answers, if it does; close the pipe."""
        self._write({"ready": inference, "answered_s": None if answered_s is None else round(answered_s, 2)})
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def error(self, line: str) -> None:
        """Report why the system cannot run."""
        self._write({"error": line})

    def _write(self, values: dict[str, Any]) -> None:
        text = json.dumps(values)
        self._log.write(f"{text}\n")
        if self._file is not None:
            try:
                print(text, file=self._file, flush=True)
            except OSError:  # `up` was interrupted and no longer listens
                self._file = None


def start_detached(config: Path, state_dir: Path, overrides: dict[str, Any]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a separate supervisor session; returns it and the end of the pipe to read."""
    paths = StatePaths(state_dir.resolve())
    log = paths.log("supervisor")
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    except OSError as error:
        remedy = "name a folder that this user can write"
        raise system_error(StartError, error, "be used", state_dir, field="--state-dir", remedy=remedy) from error
    reading, writing = os.pipe()
    argv = [sys.executable, "-P", "-m", "trefoil.cli.run.supervisor", "--config", str(config)]
    argv += ["--state-dir", str(state_dir), "--overrides", json.dumps(overrides), "--pipe", str(writing)]
    try:
        with output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(writing,),
            )
    finally:
        os.close(writing)
    return child, reading


def stop_system(state_dir: Path, say: Any) -> bool:
    """Stop what runs in a state directory, or clean up what a killed supervisor left; False when there was nothing."""
    return asyncio.run(_stop_system(StatePaths(state_dir.resolve()), say))


async def _stop_system(paths: StatePaths, say: Any) -> bool:
    clock = WallClock()
    launch = paths.read_launch()
    if launch is None:
        return False
    if launch.supervisor.alive():
        launch.supervisor.send(signal.SIGTERM)
        give_up_s = clock.monotonic_s() + DOWN_DEADLINE_S
        while launch.supervisor.alive():
            if clock.monotonic_s() > give_up_s:
                say(f"supervisor {launch.supervisor.pid} did not stop within {DOWN_DEADLINE_S:.0f} s: killing it")
                launch.supervisor.send(signal.SIGKILL)
                await clock.sleep(processes.POLL_S)
                break
            await clock.sleep(processes.POLL_S)
    lock = StateLock(paths)
    lock.acquire()
    try:
        if await uncancellable(clean_up(paths, clock)):
            say("cleaned up what a killed supervisor left")
    finally:
        lock.release()
    return True


def main(argv: list[str] | None = None) -> int:
    """`python -m trefoil.cli.run.supervisor`, of `trefoil up`; without `--pipe` in the foreground, as a unit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--overrides", type=json.loads, default={})
    parser.add_argument("--pipe", type=int)
    arguments = parser.parse_args(argv)
    pipe = Pipe(None if arguments.pipe is None else os.fdopen(arguments.pipe, "w"))
    try:
        with in_one_line():
            system = load_system(arguments.config, System, arguments.overrides)
    except TrefoilError as error:
        pipe.error(str(error))
        return EXIT_ERROR
    return run_until_signal(lambda signals: supervise(system, arguments.state_dir, signals, pipe))


if __name__ == "__main__":
    sys.exit(main())
