"""Write a family whose variants engines serve that already run: asked and measured at their addresses.

MODELS/chat/config.pbtxt, family.toml
           1/engine.json            the name that the variant has at its engine
           profile.csv              answers of 1, 4, 16, ... streams at once; joules are estimated
"""

import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import trefoil
from power_agent.triton.client import TritonClient, TritonUnready
from trefoil.cli.family.import_family import UNFINISHED, Statement, family_toml
from trefoil.core.device_types import DEVICE_TYPES, NO_MIG, device_type, engine_slice
from trefoil.core.errors import CatalogError, DiskUnavailable, SettingError, Unavailable, system_error
from trefoil.core.fleet import DeviceKind, DeviceType
from trefoil.core.units import MS_PER_S
from trefoil.engine_api import EMBED, EngineClient, EngineTarget, check_address, check_triton_address
from trefoil.profiler.profile_csv import (
    QUANTILES,
    ProfilePoint,
    ProfileProvenance,
    estimated_j,
    profile_text,
    write_profile,
)
from trefoil.profiler.stream_load import PROMPT_WORDS, WORDS
from trefoil.runtime.clock import Clock, WallClock
from trefoil.runtime.given.llm_backends import LLM_FILES, MAX_TOKENS, OPENAI, TRITON, complete_embeddings
from trefoil.runtime.given.repository_names import check_name
from trefoil.runtime.model_files import CONFIG
from trefoil.runtime.repository import FAMILY_FILE, PROFILE_FILE, load_family
from trefoil.runtime.security.key_file import KeyFile

INFERENCE_S: Final = 60.0
"""Longest wait for one."""
ASSUMED: Final = (
    "load_s: measured until the engine's first answer, or stated with --load-s. It loads nothing where no command",
    "wakes it. memory_mib: unknown, the engine has the whole GPU.",
)
SOURCE: Final = "trefoil family engine: times measured; joules estimated by core/power at density 1, no meter"


@dataclass(frozen=True, slots=True)
class StreamsMeasured:
    """Answers of so many streams at once on each GPU [ms]: median TTFT and TPOT, quantiles of one of `tokens_mean`.
    Embeddings: of one text; TPOT is 0."""

    streams: int
    ttft_ms: float
    tpot_ms: float
    latency_ms: tuple[float, float, float]


def parse_engines(given: Sequence[str], task: str = "") -> dict[str, EngineTarget]:
    """Engines by variant, from `VARIANT=ADDRESS` or `VARIANT=ADDRESS#MODEL`. `task`: EMBED, TRITON.

    Raises:
        InvalidInput: not of that form, no address, or a variant occurs twice.
    """
    found: dict[str, EngineTarget] = {}
    for text in given:
        name, _, place = text.partition("=")
        base, _, model = place.partition("#")
        if not place or name in found:
            why = "occurs twice" if name in found else "is not of the form VARIANT=ADDRESS"
            remedy = "write small=http://127.0.0.1:8000/v1, and #MODEL where the engine calls it otherwise"
            raise SettingError(why, field="ENGINE", value=text, remedy=remedy)
        check_name(name, "ENGINE")
        check = check_triton_address if task == TRITON else check_address
        found[name] = EngineTarget(check(base, "ENGINE"), model or name, task)
    return found


def read_keys(given: Mapping[str, str], engines: Mapping[str, EngineTarget]) -> dict[str, KeyFile]:
    """API keys of engines by variant, from their files; raises SettingError."""
    check_variants(given, engines, "--key-file")
    return {name: KeyFile(Path(path), "--key-file") for name, path in given.items()}


def check_variants(given: Mapping[str, object], engines: Mapping[str, EngineTarget], flag: str) -> None:
    """Check that these are variants of the engines; raises SettingError."""
    if unknown := sorted(given.keys() - engines.keys()):
        why = f"no engine has that name; there are {', '.join(engines)}"
        raise SettingError(why, field=flag, value=unknown[0], remedy=f"write {flag} {next(iter(engines))}=...")


def whole_board(name: str) -> DeviceType:
    """Device type of a board on which an engine runs, outside MIG mode; raises NotFound for none."""
    known = device_type(name)
    if known.kind == DeviceKind.MIG_GPU:
        known = DEVICE_TYPES.get(f"{name}{NO_MIG}", known)
    if known.kind != DeviceKind.WHOLE_GPU:
        raise SettingError("is not a GPU that serves whole", field="--device-type", value=name, remedy="name a GPU")
    return known


def adopt_engines(
    engines: Mapping[str, EngineTarget], into: Path, stated: Statement, board: DeviceType, streams: Sequence[int],
    gpus: int, seconds: float, say: Callable[[str], None], keys: Mapping[str, KeyFile],
) -> dict[str, list[StreamsMeasured]]:  # fmt: skip
    """Measure engines and write the family `into`/<family>; nothing is written where one of them does not answer.

    `keys`: API keys by variant. Each engine computes on so many `gpus`, which share its `streams`: there are as many
    times these.

    Raises:
        CatalogError: the family exists.
        SettingError: a time of loading is stated of no such engine.
        EngineError, Unavailable: an engine that does not answer, or too shortly.
        DiskUnavailable: the disk refuses.
    """
    check_variants(stated.load_s, engines, "--load-s")
    target = into / check_name(stated.family, "--as")
    if os.path.lexists(target):
        remedy = "take another name, or remove it first"
        raise CatalogError(f"{target} exists already", field="--as", value=stated.family, remedy=remedy)
    clock, measured, answers_s = WallClock(), dict[str, list[StreamsMeasured]](), dict[str, float]()
    config = asyncio.run(_contract(stated.family, list(engines.values()), clock))
    for name, engine in engines.items():
        run = _measure(engine, stated.tokens_mean, streams, gpus, seconds, clock, say, keys.get(name), config)
        answers_s[name], measured[name] = asyncio.run(run)
    points = [_point(board, stated.family, name, one) for name, found in measured.items() for one in found]
    date = datetime.fromtimestamp(clock.now_s(), UTC).strftime("%Y-%m-%d")
    made = ProfileProvenance(board.name, date, f"trefoil {trefoil.__version__}", False, SOURCE, "modelled")
    try:
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into, prefix=f"{UNFINISHED}{os.getpid()}-") as folder:
            fresh = Path(folder) / stated.family
            for version, engine in enumerate(engines.values(), 1):
                (fresh / str(version)).mkdir(parents=True)
                model = json.dumps({"model": engine.model}, ensure_ascii=False)
                (fresh / str(version) / LLM_FILES[OPENAI]).write_text(model + "\n", encoding="utf-8")
            (fresh / CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")
            loads = replace(stated, load_s={**answers_s, **stated.load_s})
            text = family_toml(loads, list(engines), "`trefoil family engine`", ASSUMED)
            (fresh / FAMILY_FILE).write_text(text, encoding="utf-8")
            load_family(fresh)
            write_profile(fresh / PROFILE_FILE, fresh, profile_text(points, made, estimate_energy=False))
            fresh.rename(target)
    except OSError as error:
        remedy = "make room there, or make it writable"
        raise system_error(DiskUnavailable, error, "be written", into, field="repository", remedy=remedy) from error
    return measured


async def _contract(family: str, engines: Sequence[EngineTarget], clock: Clock) -> model_config_pb2.ModelConfig:
    """Contract of the family; the tensors of completions are those of Triton's vLLM backend, those of Tritons theirs.

    Raises:
        TritonUnready: a Triton does not tell.
        CatalogError: its model answers by streams, or another one's has other tensors.
    """
    config = model_config_pb2.ModelConfig(name=family, backend=TRITON if engines[0].task == TRITON else OPENAI)
    if engines[0].task == EMBED:
        complete_embeddings(config)
    for engine in engines if engines[0].task == TRITON else ():
        client = TritonClient(engine.base, "", Path(), clock)
        try:
            own = await client.config(engine.model)
        except TritonUnready as error:
            raise TritonUnready(str(error), remedy="correct address or model; is it Triton's gRPC port?") from error
        finally:
            await client.close()
        if own.model_transaction_policy.decoupled or own.HasField("sequence_batching"):
            why = f"{engine.model} answers by streams, or has sequences: it cannot be measured here"
            raise CatalogError(why, field="ENGINE", value=str(engine), remedy="import its model instead")
        told = [(t.name, t.data_type, list(t.dims)) for t in (*own.input, *own.output)]
        if config.input and told != [(t.name, t.data_type, list(t.dims)) for t in (*config.input, *config.output)]:
            why = f"{engine.model} has other tensors than {engines[0].model}"
            raise CatalogError(why, field="ENGINE", value=str(engine), remedy="adopt it as another family")
        if not config.input:
            config.input.extend(own.input)
            config.output.extend(own.output)
            config.max_batch_size = own.max_batch_size
        config.max_batch_size = min(config.max_batch_size, own.max_batch_size)
    for tensor in config.output:
        tensor.ClearField("label_filename")
    return config


def _point(board: DeviceType, family: str, variant: str, found: StreamsMeasured) -> ProfilePoint:
    point = ProfilePoint(
        device_type=board.name,
        slice_type=board.largest.name,
        variant=variant,
        batch=found.streams,
        clock_mhz=max(board.clocks_mhz, default=0),
        latency_ms=found.latency_ms,
        throughput_per_s=found.streams * MS_PER_S / found.latency_ms[0],
        energy_active_j=None,
        memory_mib=0,
        samples=1,
    )
    return replace(point, energy_active_j=estimated_j(point), slice_type=engine_slice(family, variant))


async def _measure(
    engine: EngineTarget, tokens_mean: float, streams: Sequence[int], gpus: int, seconds: float, clock: Clock,
    say: Callable[[str], None], key: KeyFile | None, config: model_config_pb2.ModelConfig,
) -> tuple[float, list[StreamsMeasured]]:  # fmt: skip
    """Seconds until its first answer, and what was measured at each number of streams."""
    client, numbers = EngineClient(key=key), count()
    triton = TritonClient(engine.base, "", Path(), clock)

    async def infer(*_: object) -> list[tuple[float, float]]:
        return await _inferences(triton, engine, config, until_s, clock)

    ask, until_s = infer if engine.task == TRITON else _embeddings if engine.task == EMBED else _stream, 0.0
    began_s, found = clock.monotonic_s(), list[StreamsMeasured]()
    try:
        await (infer() if engine.task == TRITON else client.probe(engine))
        answered_s = round(clock.monotonic_s() - began_s, 3)
        for at_once in streams:
            say(f"{engine}: {at_once * gpus} streams at once")
            until_s = clock.monotonic_s() + seconds
            tasks = [ask(client, engine, tokens_mean, numbers, until_s, clock) for _ in range(at_once * gpus)]
            told = [one for each in await asyncio.gather(*tasks) for one in each]
            whole = sorted(ttft + tpot * (tokens_mean - 1) for ttft, tpot in told)
            p50, p95, p99 = (whole[min(len(whole) - 1, int(q * len(whole)))] for q in QUANTILES)
            ttft, tpot = (statistics.median(times) for times in zip(*told, strict=True))
            found.append(StreamsMeasured(at_once, ttft, tpot, (p50, p95, p99)))
        return answered_s, found
    finally:
        await client.close()
        await triton.close()


async def _stream(
    client: EngineClient, engine: EngineTarget, tokens_mean: float, numbers: "count[int]", until_s: float, clock: Clock
) -> list[tuple[float, float]]:
    """TTFT and TPOT [ms] of one answer after the other, at least of one; raises EngineError, Unavailable."""
    found, most = list[tuple[float, float]](), max(2, round(tokens_mean))
    while not found or clock.monotonic_s() < until_s:
        asked = {"prompt": _words(next(numbers)), MAX_TOKENS: most, "temperature": 0}
        began_s, times, tokens = clock.monotonic_s(), list[float](), 0
        async with aclosing(client.stream(engine, asked)) as pieces:
            async for piece in pieces:
                if piece.text:
                    times.append(clock.monotonic_s())
                tokens = piece.tokens_out or max(tokens, len(times))
        if not 2 <= tokens <= max(most, len(times)) or len(times) < 2:
            remedy = "ask a model that goes on, or profile it by hand"
            why = f"{engine.base} answered {tokens} tokens, asked for {most}: no time of a token"
            raise Unavailable(why, remedy=remedy)
        tpot_ms = (times[-1] - times[0]) * MS_PER_S / (tokens - 1)
        found.append(((times[0] - began_s) * MS_PER_S, max(tpot_ms, 1e-3)))
    return found


async def _embeddings(
    client: EngineClient, engine: EngineTarget, _: float, numbers: "count[int]", until_s: float, clock: Clock
) -> list[tuple[float, float]]:
    """Time [ms] of one text after the other, and 0; raises EngineError."""
    found: list[tuple[float, float]] = []
    while not found or clock.monotonic_s() < until_s:
        began_s = clock.monotonic_s()
        await client.embed(engine, (_words(next(numbers)),))
        found.append(((clock.monotonic_s() - began_s) * MS_PER_S, 0.0))
    return found


async def _inferences(
    client: TritonClient, engine: EngineTarget, config: model_config_pb2.ModelConfig, until_s: float, clock: Clock
) -> list[tuple[float, float]]:
    """Time [ms] of one inference of zeros after the other, and 0; raises TritonUnready."""
    own = model_config_pb2.ModelConfig()
    own.CopyFrom(config)
    own.name, found = engine.model, list[tuple[float, float]]()
    while not found or clock.monotonic_s() < until_s:
        found.append((await client.infer(own, 0, INFERENCE_S), 0.0))
    return found


def _words(number: int) -> str:
    return " ".join([str(number), *(WORDS[i % len(WORDS)] for i in range(PROMPT_WORDS - 1))])


def lines(
    stated: Statement,
    folder: Path,
    engines: Mapping[str, EngineTarget],
    measured: Mapping[str, list[StreamsMeasured]],
    gpus: int,
    keys: Mapping[str, str],
) -> list[str]:
    """What was measured, and the settings that adopt the engines."""
    found = [
        f"  {name}: {one.streams * gpus} streams: TTFT {one.ttft_ms:.0f} ms, TPOT {one.tpot_ms:.1f} ms"
        if one.tpot_ms
        else f"  {name}: {one.streams * gpus} at once: {one.ttft_ms:.1f} ms each"
        for name, each in measured.items()
        for one in each
    ]
    found += [f"{folder} holds family {stated.family}. Its engines are adopted by these settings of `trefoil up`:"]
    found += ["(a power agent of its own: [[engines]]; devices: the GPUs that the engine computes on)"]
    for name, engine in engines.items():
        found += ["", "[[power_agent.engines]]", f'family = "{stated.family}"', f'variant = "{name}"']
        found += [f'api = "{TRITON}"'] if engine.task == TRITON else []
        found += [f"address = {json.dumps(engine.base)}", f"devices = {json.dumps([f'gpu{n}' for n in range(gpus)])}"]
        found += [f"key_file = {json.dumps(os.path.abspath(keys[name]))}"] if name in keys else []
    return found
