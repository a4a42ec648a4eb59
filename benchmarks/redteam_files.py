"""Attacks by files: a repository that wants more than to be imported, strange files where services keep state."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final

from typer.testing import CliRunner

from benchmarks.chaos_rows import Trouble
from benchmarks.echo_system import EchoSystem
from benchmarks.redteam import Check, Outcome
from tests.support.hostile_repository import ATTACKS, MODEL, NAMES, SECRET, leaves_nothing, make
from trefoil.cli.main import app
from trefoil.core.errors import TrefoilError
from trefoil.runtime.state_files import BAD

IMPORT_S: Final = 20.0
LASTS_S: Final = 6.0
STARTS_S: Final = 0.5
TRIES: Final = 20
FOLDERS: Final = {"power_agent": "agent"}  # below the state directory; of others the service's name
IN_FLIGHT: Final = 16  # on one of two workers, at most: all credits of four slices and as many in its queue
KEPT: Final = ("objectives", "control", "plans", "published", "commanded", "epoch", "led", "counts", "budgets")
Put = Callable[[Path], object]
STRANGE: Final[Mapping[str, Put]] = {
    "an empty list": lambda path: path.write_text("[]"),
    "other fields": lambda path: path.write_text('{"any": {"thing": 1}}'),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 16),
    "half of it": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a sparse file of 1 TiB": lambda path: os.truncate(path, 2**40),
}
NEWER: Final = '{"version": 99}'


def checks() -> tuple[Check, ...]:
    """Attacks that need no system."""
    return (
        Check("a Triton repository that names other files, hangs or overflows is imported", hostile_imports),
        Check("--as names a path", hostile_names),
    )


def troubles() -> tuple[Trouble, ...]:
    """Attacks on the running system: state files are replaced under a stopped service, which is then killed."""
    found = [  # first: a service that ends often is started again later
        Trouble(
            f"{name} of the {service} is of a newer version; it is killed; the file is moved away",
            partial(newer, service=service, name=name),
            STARTS_S, frozenset({service}),
        )
        for service, name in (("controller", "objectives.json"), ("carbon_feed", "epoch-*"))
    ]  # fmt: skip
    found += [
        Trouble(
            f"each state file of the controller holds something strange ({turn}); it is killed",
            partial(spoiled, service="controller", names=[f"{name}.json" for name in KEPT], turn=turn),
            LASTS_S, frozenset({"controller"}),
        )
        for turn in range(2)  # a service that ends too often is started again later
    ]  # fmt: skip
    found.append(
        Trouble(
            "the feed's epoch is an empty list; it is killed",
            partial(spoiled, service="carbon_feed", names=["epoch-*"], turn=0),
            LASTS_S, frozenset({"carbon_feed"}),
        )
    )  # fmt: skip
    found += [
        Trouble(
            f"the agent's energy log holds something strange ({turn}); it is killed",
            partial(spoiled, service="power_agent", names=["energy.*.jsonl"], turn=turn),
            LASTS_S, frozenset({"power_agent"}),
        )
        for turn in (2, 4)
    ]  # fmt: skip
    found += [
        Trouble(
            f"the dispatcher's table holds something strange ({turn}); a worker is killed",
            partial(spoiled, service="dispatcher", names=["*/table.jsonl"], turn=turn),
            LASTS_S, frozenset({"dispatcher worker 0", "dispatcher worker 1"}), IN_FLIGHT,
        )
        for turn in (0, 2, 5)
    ]  # fmt: skip
    return tuple(found)


async def hostile_imports(folder: Path) -> Outcome:
    """Every repository of `tests/support/hostile_repository.py`."""
    broken = []
    for number, (what, (strike, names)) in enumerate(ATTACKS.items()):
        place = folder / str(number)
        place.mkdir()
        repository, secret = make(place)
        strike(repository / MODEL, secret)
        code, said = await _import(repository, "toy=small,large")
        if code != 2 or names not in said or "Remedy: " not in said or SECRET in said:
            broken.append(f"{what}: exit code {code}, {said[-150:]!r}")
        if left := leaves_nothing(place):
            broken.append(f"{what}: left {left}")
    return Outcome(len(ATTACKS), len(broken), broken=tuple(broken))


async def hostile_names(folder: Path) -> Outcome:
    """Names of the family, and of a model."""
    repository, _ = make(folder)
    tried = [text for name in NAMES for text in (f"{name}=small,large", f"toy=small,{name}")]
    answers = [(text, *await _import(repository, text)) for text in tried]
    broken = [f"{text}: exit code {code}, {said[-150:]!r}" for text, code, said in answers if code != 2]
    broken += [f"left {path}" for path in leaves_nothing(folder)]
    return Outcome(len(tried), len(broken), broken=tuple(broken))


async def _import(repository: Path, as_: str) -> tuple[int, str]:
    """Exit code and words of an import; -1: it does not end."""
    ours = repository.parent / "ours"
    stated = ["--slo-latency-ms", "50", "--accuracy", "small=0.7", "--accuracy", "large=0.9", "--repository", str(ours)]
    command = ["family", "import", str(repository), "--as", as_, *stated]
    try:
        async with asyncio.timeout(IMPORT_S):
            done = await asyncio.to_thread(CliRunner().invoke, app, command)
    except TimeoutError:
        return -1, "hangs"
    return done.exit_code, done.output + (repr(done.exception) if done.exit_code not in (0, 2) else "")


def _paths(system: EchoSystem, service: str, names: list[str]) -> list[Path]:
    folder = system.launcher.paths.state_dir / FOLDERS.get(service, service)
    return [path for name in names for path in sorted(folder.glob(name))]


def _strike(system: EchoSystem, service: str, names: list[str], puts: Sequence[Put]) -> list[Path]:
    """Replace files of a service while it stands still, each in another way, then kill it (one worker of a
    dispatcher)."""
    pid, paths = system.launcher.pid(service), _paths(system, service, names)
    pid = system.workers()[0].pid if service == "dispatcher" else pid
    assert paths, f"{service} keeps none of {names}"
    os.kill(pid, signal.SIGSTOP)
    for path, put in zip(paths, cycle(puts), strict=False):
        put(path)
    os.kill(pid, signal.SIGKILL)
    return paths


@asynccontextmanager
async def spoiled(system: EchoSystem, service: str, names: list[str], turn: int) -> AsyncIterator[None]:
    """Strange state files at a service's start: set aside, and what stood in force is so again. Another worker of a
    dispatcher may write their table again before that."""
    before = await system.client.plan()
    puts = list(STRANGE.values())
    paths = _strike(system, service, names, puts[turn:] + puts[:turn])
    struck = {path: path.lstat().st_ino for path in paths if service == "dispatcher"}
    yield
    after = None
    for _ in range(TRIES):
        missing = [
            path.name
            for path in paths
            if not os.path.lexists(f"{path}{BAD}") and path.lstat().st_ino == struck.get(path, path.lstat().st_ino)
        ]
        with suppress(TrefoilError):
            after = await system.client.plan()
        if after is not None and not missing:
            break
        await system.clock.sleep(1.0)
    assert not missing, f"not set aside: {missing}"
    assert after is not None, "no controller answers"
    assert (after.pinned, after.mode) == (before.pinned, before.mode), "the pin or the mode is forgotten"
    assert [route.family for route in after.plan.routes] == [route.family for route in before.plan.routes]
    assert service != "controller" or after.files_set_aside, "status does not say what was set aside"
    for path in paths:
        for old in path.parent.glob(f"{path.name}{BAD}*"):
            old.rmdir() if old.is_dir() else old.unlink()


@asynccontextmanager
async def newer(system: EchoSystem, service: str, name: str) -> AsyncIterator[None]:
    """A file of a newer version at a service's start: it ends with one line that names it, and leaves it."""
    (path,) = _strike(system, service, [name], [lambda path: path.write_text(NEWER)])
    yield
    lines = list[str]()
    for _ in range(TRIES):  # until it has been started again
        lines = [line for line in system.log(service).splitlines() if str(path) in line and "version 99" in line]
        if lines:
            break
        await system.clock.sleep(1.0)
    text = path.read_text()
    path.unlink()
    assert text == NEWER, f"it was not left as it was: {text[:100]!r}"
    assert any("Remedy" in line for line in lines), "no line names the file and its version"
    assert "Traceback" not in system.log(service)
