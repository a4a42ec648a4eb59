"""`trefoil family engine`: a family of engines that already run, measured, or refused by name."""

import asyncio
import threading
import tomllib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support import openai_engine
from tests.unit.cli.test_family import done, refused, run
from trefoil.core.common import Basis
from trefoil.runtime.given.llm_backends import embeds
from trefoil.runtime.model_files import contract
from trefoil.runtime.repository import load_family

OPTIONS = ("--as", "chat", "--tokens-mean", 8, "--slo-latency-ms", 2000, "--streams", "1,3", "--seconds", 0)
BOARD = ("--device-type", "A100-SXM4-40GB")


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    loop, found, stop = asyncio.new_event_loop(), list[str](), asyncio.Event()
    ready = threading.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for settings in ({}, {"key": "sk-1"}, {"too_many": 10**9}):
                found.append((await stack.enter_async_context(openai_engine.serving(**settings))).address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(60)
    yield found
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def address(addresses: list[str]) -> str:
    return addresses[0]


def engine(tmp_path: Path, *given: str, options: tuple[object, ...] = (*OPTIONS, *BOARD), accuracy: str = "tiny=0.6"):
    return run("engine", *given, *options, "--accuracy", accuracy, "--repository", tmp_path)


def test_a_family_is_written_with_the_times_of_its_engine(tmp_path, address):
    said = engine(tmp_path, f"tiny={address}#org/tiny")
    assert said.exit_code == 0, said.output
    [settings] = tomllib.loads(said.stdout.partition("\n\n")[2])["power_agent"]["engines"]
    assert settings == {"family": "chat", "variant": "tiny", "address": address, "devices": ["gpu0"]}
    family, rows = load_family(tmp_path / "chat")
    assert (family.generative, family.tokens_mean, family.best.accuracy) == (True, 8.0, 0.6)
    assert [(row.device_type, row.slice_type, row.batch) for row in rows] == [
        ("A100-SXM4-40GB-nomig", "engine:chat:tiny", streams) for streams in (1, 3)
    ]
    assert all(row.provenance.basis == Basis.MODELLED and row.latency_ms_p50 > 8 for row in rows)
    [shown] = done(run("check", "chat", "--graphs-only", "--repository", tmp_path, "--json"))
    assert shown["problems"] == []
    assert "language models of engines that already run are not run here" in shown["state"]
    refused(engine(tmp_path, f"tiny={address}#org/tiny"), "--as = 'chat'", "exists already")


def test_what_an_engine_loads_is_measured_or_stated_with_its_basis(tmp_path, address):
    """An engine that runs loads nothing: a plan that counted minutes of loading would rather not change."""
    both = (f"tiny={address}#org/tiny", f"woken={address}#org/tiny")
    options = (*OPTIONS, *BOARD, "--load-s", "woken=90", "--accuracy", "woken=0.7")
    refused(engine(tmp_path, *both, options=(*options, "--load-s", "ghost=1")), "--load-s = 'ghost'", "tiny, woken")
    refused(engine(tmp_path, *both, options=(*options, "--load-s", "tiny=-1")), "load_s")
    assert not list(tmp_path.iterdir())
    assert engine(tmp_path, *both, options=options).exit_code == 0
    tiny, woken = load_family(tmp_path / "chat")[0].variants
    assert 0 < tiny.load_s < 30
    assert woken.load_s == 90
    assert "# load_s: measured until the engine's first answer" in (tmp_path / "chat" / "family.toml").read_text()


def test_the_streams_of_an_engine_on_two_gpus_are_shared_by_them(tmp_path, address):
    said = engine(tmp_path, f"tiny={address}#org/tiny", options=(*OPTIONS, *BOARD, "--gpus", 2))
    assert "6 streams: TTFT" in said.output
    [settings] = tomllib.loads(said.stdout.partition("\n\n")[2])["power_agent"]["engines"]
    assert settings["devices"] == ["gpu0", "gpu1"]
    assert [row.batch for row in load_family(tmp_path / "chat")[1]] == [1, 3]


@pytest.mark.parametrize(
    ("given", "texts"),
    [(("tiny",), ("ENGINE = 'tiny'", "VARIANT=ADDRESS")),
     (("tiny=127.0.0.1:80",), ("ENGINE = '127.0.0.1:80'", "not an address of an engine")),
     (("tiny=http://h/v1", "tiny=http://h/v1"), ("occurs twice",)),
     (("tiny=http://h/v1", "other=http://h/v1"), ("no accuracy of other",))],
)  # fmt: skip
def test_what_is_no_engine_by_its_words_is_refused(tmp_path, given, texts):
    refused(engine(tmp_path, *given), *texts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "texts"),
    [(("--device-type", "Tesla X9"), ("unknown device type", "Tesla X9")),
     (("--device-type", "cpu:4"), ("--device-type = 'cpu:4'", "not a GPU that serves whole")),
     ((*BOARD, "--streams", "4,1"), ("--streams = '4,1'",)),
     ((*BOARD, "--streams", "x"), ("--streams = 'x'",))],
)  # fmt: skip
def test_boards_and_numbers_of_streams_that_cannot_be_are_refused(tmp_path, address, changed, texts):
    refused(engine(tmp_path, f"tiny={address}#org/tiny", options=(*OPTIONS, *changed)), *texts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "why"), [("other", "answers 404 for model other: The model does not exist"), ("", "404 for model tiny")]
)
def test_an_engine_that_does_not_serve_the_model_is_said_and_nothing_is_written(tmp_path, address, model, why):
    said = engine(tmp_path, f"tiny={address}#{model}")
    assert said.exit_code, said.output
    assert why in said.output
    assert "Remedy: correct address or model" in said.output
    assert not list(tmp_path.iterdir())


def test_an_engine_that_counts_more_tokens_than_it_was_asked_for_has_no_profile(tmp_path, addresses):
    """Each token would seem to take no time."""
    said = engine(tmp_path, f"tiny={addresses[2]}#org/tiny")
    assert said.exit_code, said.output
    assert "answered 1000000008 tokens, asked for 8: no time of a token" in " ".join(said.output.split())
    assert not list(tmp_path.iterdir())


EMBEDS = ("--as", "passages", "--embeddings", "--slo-latency-ms", 500, "--streams", "1,3", "--seconds", 0, *BOARD)


def test_a_family_of_embeddings_is_written(tmp_path, address):
    said = engine(tmp_path, f"tiny={address}#org/tiny", options=EMBEDS)
    assert said.exit_code == 0, said.output
    assert "3 at once: " in said.output
    family, rows = load_family(tmp_path / "passages")
    assert (family.generative, family.tokens_mean) == (False, 0.0)
    assert [row.batch for row in rows] == [1, 3]
    assert embeds(contract(tmp_path, "passages"))
    [shown] = done(run("check", "passages", "--graphs-only", "--repository", tmp_path, "--json"))
    assert shown["problems"] == []
    for wrong, why in (
        ((*EMBEDS, "--tokens-mean", 8), "whole answers have no tokens"),
        (OPTIONS[:2] + EMBEDS[3:], "2 tokens"),
    ):
        refused(engine(tmp_path, f"tiny={address}", options=wrong), "--tokens-mean", why)


def test_an_engine_with_a_key_is_measured_by_its_file(tmp_path, addresses):
    given, file = f"tiny={addresses[1]}#org/tiny", tmp_path / "key"
    file.write_text("sk-1")
    file.chmod(0o600)
    models = tmp_path / "models"
    refused(engine(models, given), "key_file = 'none'", "answers 401", "name a file that holds its API key")
    said = engine(models, given, options=(*OPTIONS, *BOARD, "--key-file", f"tiny={file}"))
    assert said.exit_code == 0, said.output
    [settings] = tomllib.loads(said.stdout.partition("\n\n")[2])["power_agent"]["engines"]
    assert settings["key_file"] == str(file)
    assert "sk-1" not in said.output
    file.write_text("sk-wrong")
    wrong = engine(tmp_path / "b", given, options=(*OPTIONS, *BOARD, "--key-file", f"tiny={file}"))
    refused(wrong, "key_file = '[key]'", "answers 401", "no such key: [key]")
    assert "sk-wrong" not in wrong.output
    refused(
        engine(models, given, options=(*OPTIONS, *BOARD, "--key-file", f"big={file}")), "--key-file = 'big'", "tiny"
    )
    file.chmod(0o644)
    refused(engine(models, given, options=(*OPTIONS, *BOARD, "--key-file", f"tiny={file}")), "chmod o=")
