"""A Triton that already runs, with names of its own for models: behind a dispatcher, and made a family by a command."""

import asyncio
import dataclasses
import tomllib

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.support.dispatching import DispatcherSystem, dispatching, until
from tests.support.special_models import SpecialTriton
from tests.unit.cli.test_family import done, refused, run
from tests.unit.dispatcher.worlds import key, node, status
from trefoil.core.fleet import Hosted
from trefoil.core.plan import Route, RouteTarget
from trefoil.runtime.model_files import contract
from trefoil.runtime.repository import load_family

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    made = SpecialTriton(tmp_path_factory.mktemp("triton"), 0, 3, ("scores", "parrot", "repeat", "moody"))
    try:
        asyncio.run(made.ready())
        yield made
    finally:
        made.close()


@pytest.mark.gate
async def test_requests_bear_its_name_and_answers_that_of_the_family(state, tmp_path, triton):
    names = {"marks": "scores", "counting": "repeat", "wrong": "nothing"}
    async with dispatching(state, tmp_path) as running:
        system = DispatcherSystem(running, state, [])
        slices = [
            dataclasses.replace(
                status(n), hosted=(Hosted(family, f"v{n}", 7, 0, 1, 1, 4),),
                grpc_target=f"triton://{triton.target}/{family}/7#{model}",
            )
            for n, (family, model) in enumerate(names.items())
        ]  # fmt: skip
        routes = [
            Route(family, "weighted", "fifo", (RouteTarget(key(n), f"v{n}", 0, 1.0, 4, False, "", 0.6, 7),), 0, 0, {})
            for n, family in enumerate(names)
        ]
        await system.publish(node(slices), routes)
        await until(lambda: all(running.contracts.known(family) for family in ("marks", "counting")))
        async with triton_grpc.InferenceServerClient(running.address) as client:
            metadata = await client.get_model_metadata("marks", as_json=True)
            assert (metadata["name"], metadata["inputs"][0]["name"]) == ("marks", "SCORES")
            value = np.array([[1, 2, 3, 4]], np.float32)
            given = triton_grpc.InferInput("SCORES", [1, 4], "FP32")
            given.set_data_from_numpy(value)
            found = await client.infer("marks", [given], request_id="mine")
            answer = found.get_response()
            assert (answer.model_name, answer.model_version, answer.id) == ("marks", "1", "mine")
            assert answer.parameters["trefoil_variant"].string_param == "v0"
            assert found.as_numpy("SCORES").tolist() == value.tolist()
            for count, errors in ((3, 0), (-2, 1)):
                seen = [each async for each in client.stream_infer(counting(count))]
                assert [result.get_response().model_name for result, error in seen if not error] == (
                    ["counting"] * abs(count)
                )
                assert [str(error) for _, error in seen if error] == ["no more than that"] * errors
            with pytest.raises(InferenceServerException, match="nothing"):
                await client.infer("wrong", [given])
        assert system.local.accounting.load.totals["marks"].answered == 1
        await until(lambda: not system.local.routing.in_flight())


async def counting(count: int):
    inputs = []
    for name, value in (("COUNT", count), ("DELAY_MS", 1)):
        one = triton_grpc.InferInput(name, [1, 1], "INT32")
        one.set_data_from_numpy(np.array([[value]], np.int32))
        inputs.append(one)
    yield {"model_name": "counting", "inputs": inputs}


OPTIONS = ("--api", "triton", "--slo-latency-ms", 500, "--streams", "1,2", "--seconds", 0, "--device-type", "L4")


def adopted(folder, *given, options=OPTIONS, accuracy="a=0.6"):
    return run("engine", *given, "--as", "marks", *options, "--accuracy", accuracy, "--repository", folder)


def test_a_family_is_written_by_what_the_triton_tells(tmp_path, triton):
    said = adopted(tmp_path, f"a={triton.target}#scores")
    assert said.exit_code == 0, said.output
    [settings] = tomllib.loads(said.stdout.partition("\n\n")[2])["power_agent"]["engines"]
    assert settings == {
        "family": "marks", "variant": "a", "api": "triton", "address": triton.target, "devices": ["gpu0"]
    }  # fmt: skip
    family, rows = load_family(tmp_path / "marks")
    config = contract(tmp_path, "marks")
    assert (family.generative, [row.batch for row in rows]) == (False, [1, 2])
    assert (config.backend, config.max_batch_size, [tensor.name for tensor in config.input]) == (
        "triton",
        8,
        ["SCORES"],
    )
    [shown] = done(run("check", "marks", "--graphs-only", "--repository", tmp_path, "--json"))
    assert shown["problems"] == []
    assert "models of Tritons that already run are not run here" in shown["state"]


@pytest.mark.parametrize(
    ("given", "options", "texts"),
    [
        (("a={}#repeat",), OPTIONS, ("ENGINE", "repeat answers by streams")),
        (("a={}#gone",), OPTIONS, ("gone",)),
        (("a=http://127.0.0.1:1/v1",), OPTIONS, ("ENGINE = 'http://127.0.0.1:1/v1'", "host:port of its gRPC port")),
        (("a={}",), (*OPTIONS, "--tokens-mean", 5), ("--tokens-mean = 5",)),
        (("a={}",), (*OPTIONS, "--embeddings"), ("--api = 'triton'",)),
        (("a={}",), ("--api", "tritn", *OPTIONS[2:]), ("--api = 'tritn'",)),
    ],
)
def test_what_cannot_be_adopted_is_refused_and_nothing_is_written(tmp_path, triton, given, options, texts):
    refused(adopted(tmp_path, *(text.format(triton.target) for text in given), options=options), *texts)
    assert not list(tmp_path.iterdir())
