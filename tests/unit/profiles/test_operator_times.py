"""Operators timed one by one: what is run, how often, at which clock, and who lets go of it whatever ends it."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from protos.power_agent.v1 import power_agent_pb2
from trefoil.cli.family.measured_operators import OperatorMeasurement
from trefoil.core.catalog import Variant
from trefoil.core.device_types import A100_40GB, P4, T4
from trefoil.core.errors import CatalogError, SettingError, TrefoilError, Unavailable
from trefoil.core.fleet import ClockLease, DeviceStatus, NodeStatus, SliceStatus, stage_model
from trefoil.profiler import operator_times
from trefoil.profiler.assumed import OperatorCost
from trefoil.profiler.graph_costs import costs
from trefoil.profiler.operator_models import COPIES, RepeatedOperator, repeated_operators
from trefoil.profiler.operator_times import CLOCK_TIMEOUT_S, PLACES, HeldClock, OperatorBench
from trefoil.profiler.places import places_on
from trefoil.profiler.triton_load import Window
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock

GPU, HOLDER = "node0/gpu0", "a test"
VARIANT = Variant("digits-m", 3, 0.95, "a test", 16, 0.1, 1000, "MIT")
STATUS = DeviceStatus(GPU, A100_40GB)
PASS_MS, OUTSIDE_MS = 8.0, 3.0


class SleepingClock(ManualClock):
    """A clock that moves when somebody sleeps."""

    async def sleep(self, seconds: float) -> None:
        self.move(seconds)


@dataclass
class Agent:
    """An agent whose GPU goes to the clock that is leased at once, unless told otherwise."""

    lease: ClockLease | None = None
    stuck_mhz: int = 0
    drift: tuple[str, ...] = ()
    gone: bool = False
    released: int = 0
    locked: list[int] = field(default_factory=list)

    @property
    def clock_mhz(self) -> int:
        return self.stuck_mhz or (self.lease.max_mhz if self.lease else 1410)

    def _answer(self) -> None:
        if self.gone:
            none: Any = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "connection refused")

    async def GetNode(self, _request: Any, timeout: float) -> Any:
        self._answer()
        reasons = ("software_power_cap",) if self.stuck_mhz else ()
        device = replace(
            STATUS, clock_mhz=self.clock_mhz, clock_lease=self.lease, drift=self.drift, clock_event_reasons=reasons
        )
        return power_agent_pb2.GetNodeResponse(node=codec.to_proto(NodeStatus("node0", devices=(device,))))

    async def SetClocks(self, request: Any, timeout: float) -> Any:
        self._answer()
        self.lease = codec.from_proto(request.lease)
        assert self.lease is not None
        assert self.lease.min_mhz == self.lease.max_mhz
        self.locked.append(self.lease.max_mhz)
        return power_agent_pb2.SetClocksResponse(lease=request.lease)

    async def ReleaseClocks(self, request: Any, timeout: float) -> Any:
        self._answer()
        assert request.holder == HOLDER
        self.released, self.lease = self.released + 1, None
        return power_agent_pb2.ReleaseClocksResponse()


@dataclass
class Bench:
    """What stands around an OperatorBench: node, agent, and Tritons whose operators follow the clock by a share s."""

    repository: Path
    shares: list[float]
    agent: Agent = field(default_factory=Agent)
    emptied: int = 0
    served: list[str] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None
    unready: bool = False

    async def serve(self, place: Any, family: str, variant: Variant, max_batch: int) -> SliceStatus:
        if self.unready:
            raise Unavailable("not ready within 180 s")
        (hosted,) = place.hosting(family, variant, max_batch).slices[0].hosted
        self.served.append(hosted.model)
        assert (self.repository / hosted.model / "3" / "model.onnx").is_file()
        return SliceStatus(place.key, hosted=(hosted,), grpc_target="127.0.0.1:1")

    async def empty(self) -> None:
        self.emptied += 1
        if self.agent.gone:
            raise Unavailable("nobody empties it")

    def triton(self, _target: str, model: str, *_: Any) -> Any:
        return Triton(self, self.shares[int(model.partition("@")[2].partition("of")[0]) - 1])

    def bench(self) -> OperatorBench:
        clock = SleepingClock()
        (place,) = places_on((STATUS,), ["7g.40gb"], [])
        held = HeldClock(self.agent, GPU, clock, HOLDER)
        node: Any = self
        return OperatorBench(node, place, held, (1410, 705), "digits", VARIANT, self.repository, clock, 1.0)


@dataclass
class Triton:
    """Answers a request of n passes in the time that the law gives; a share below 0: never."""

    bench: Bench
    share: float

    async def close(self) -> None:
        pass

    async def make_request(self, version: int, batch: int) -> int:
        assert version == VARIANT.version
        return batch

    async def warm_up(self, _request: int) -> None:
        if self.share < 0:
            raise Unavailable("does not answer: no kernel")

    async def closed_loop(self, request: int, batch: int, seconds: float) -> Window:
        longer = 1 - self.share + self.share * 1410 / self.bench.agent.clock_mhz
        self.bench.meanwhile()
        return Window(0.0, seconds, batch, [OUTSIDE_MS + request * PASS_MS * longer] * 3)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    one = Bench(tmp_path, [])
    monkeypatch.setattr(operator_times, "TritonSlice", one.triton)
    return one


def model(*nodes: Any, weights: dict[str, Any], inputs: dict[str, list[int]], output: str) -> Any:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes), "g", [value(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [value(output, TensorProto.FLOAT, None)], [numpy_helper.from_array(v, name) for name, v in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def repeated(folder: Path, graph: Any) -> tuple[list[RepeatedOperator], dict[str, str]]:
    path = folder / "whole.onnx"
    onnx.save(graph, str(path))
    return repeated_operators(graph, [OperatorCost(**one) for one in costs(str(path), {})["operators"]])


@pytest.fixture
def relus(tmp_path: Path) -> list[RepeatedOperator]:
    """Three operators of other shapes each."""
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="relu0")]
    nodes += [helper.make_node("Concat", ["a", "a"], ["b"], axis=1, name="both")]
    nodes += [helper.make_node("Relu", ["b"], ["y"], name="relu1")]
    return repeated(tmp_path, model(*nodes, weights={}, inputs={"x": [1, 6]}, output="y"))[0]


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_operators_alike_are_one_and_what_no_request_waits_for_is_none(tmp_path):
    node, weights = helper.make_node, {name: np.eye(6, dtype=np.float32) for name in ("w", "v")}
    graph = model(
        node("Transpose", ["w"], ["t"], perm=[1, 0], name="once"), node("MatMul", ["x", "t"], ["a"], name="first"),
        node("Relu", ["a"], ["b"], name="relu"), node("MatMul", ["b", "v"], ["c"], name="second"),
        node("Slice", ["c", "from", "to", "axis"], ["d"], name="front"),
        node("Slice", ["c", "two", "to", "axis"], ["e"], name="back"),
        node("Concat", ["d", "e"], ["f"], axis=1, name="joined"),
        weights=weights | {name: np.array([n]) for name, n in (("from", 0), ("to", 6), ("two", 2), ("axis", 1))},
        inputs={"x": [1, 6]}, output="f",
    )  # fmt: skip
    found, whys = repeated(tmp_path, graph)
    alike = {("first", "second"), ("relu",), ("front",), ("back",), ("joined",)}
    assert {tuple(sorted(one.names)) for one in found} == alike
    assert whys == {"once": "it is done once, when the model is loaded"}


@pytest.mark.parametrize("passes", [1, 5])
def test_the_graph_runs_the_operator_as_often_as_it_is_told_however_it_is_optimised(tmp_path, passes):
    weights = {"w": np.ones((4, 3, 3, 3), np.float32), "least": np.float32(0.1)}
    graph = model(
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv"),
        helper.make_node("Clip", ["a", "", "least"], ["y"], name="clip"),  # an input is left out
        weights=weights, inputs={"x": [1, 3, 8, 8]}, output="y",
    )  # fmt: skip
    for one in repeated(tmp_path, graph)[0]:
        options = onnxruntime.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "pass")
        session = onnxruntime.InferenceSession(
            one.graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given = np.linspace(0, 0.9, passes, dtype=np.float32)[:, None]
        (answer,) = session.run(None, {"X": given})
        assert answer == pytest.approx(given + np.prod(one.cost.shape)), "what came out is the operator's output"
        events = json.loads(Path(session.end_profiling()).read_text())
        ran = [event["args"]["op_name"] for event in events if event.get("cat") == "Node"]
        assert ran.count(one.cost.operator) == passes * COPIES


def test_what_cannot_be_repeated_says_why(tmp_path):
    node, value = helper.make_node, helper.make_tensor_value_info
    inner = helper.make_graph([node("Relu", ["a"], ["r"])], "then", [], [value("r", TensorProto.FLOAT, None)])
    graph = model(
        node("Relu", ["x"], ["a"], name="relu"),
        node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner, name="if"),
        weights={"yes": np.bool_(True)}, inputs={"x": [1, 6]}, output="y",
    )  # fmt: skip
    known = [OperatorCost("if", "If", 1, 8, (1, 6), "float", [("bool", [])]), OperatorCost("fused", "Gelu", 1, 8, (1,))]
    text = OperatorCost("relu", "Relu", 1, 8, (1, 6), "string", [("string", [1, 6])])
    _, whys = repeated_operators(graph, [*known, text])
    assert whys["fused"] == "ONNX Runtime runs it as other operators"
    assert whys["if"] == "it has graphs of its own"
    assert whys["relu"] == "string cannot be generated"


# --- times ------------------------------------------------------------------------------------------------------------


async def test_times_are_those_of_the_law_and_the_clock_is_given_back(bench, relus):
    bench.shares = [1.0, -1.0, 0.25]
    said: list[str] = []
    times, whys = await bench.bench().run(relus, Path(sys.executable), said.append)
    each = PASS_MS / COPIES
    assert (times["relu0"].full_ms, times["relu0"].half_ms) == pytest.approx((each, 2 * each))
    assert (times["relu1"].full_ms, times["relu1"].half_ms) == pytest.approx((each, 1.25 * each))
    assert times["relu1"].samples == 4 * 3
    assert "does not answer: no kernel" in whys["both"]
    assert bench.served == [stage_model("digits", at, PLACES) for at in range(3)]
    assert (bench.agent.released, bench.agent.lease, bench.emptied) == (1, None, 1)
    assert sorted(bench.agent.locked)[0] == 705
    assert len(said) == 3
    assert not [path for path in bench.repository.iterdir() if "@" in path.name]


def lapses(agent: Agent) -> None:
    agent.lease = None


def is_taken(agent: Agent) -> None:
    agent.lease = ClockLease(GPU, 0, 900, "an operator", 2)


def is_stuck(agent: Agent) -> None:
    agent.stuck_mhz = 1200


def drifts(agent: Agent) -> None:
    agent.drift = ("clock range 1410-1410 MHz is not honoured: hardware_thermal",)


def goes(agent: Agent) -> None:
    agent.gone = True


@pytest.mark.parametrize(
    ("happens", "words", "released"),
    [
        (lapses, "its clock lease was lost while it was measured: no process holds it now", 0),
        (is_taken, "its clock lease was lost while it was measured: an operator holds it now", 0),
        (is_stuck, "runs at 1200 MHz, not at 1410: software_power_cap", 1),
        (drifts, "is not honoured: hardware_thermal", 1),
        (goes, "UNAVAILABLE: connection refused", 0),  # what is left is said beside it
    ],
)
async def test_a_clock_that_is_not_held_ends_it_in_one_line_and_nothing_stays(bench, relus, happens, words, released):
    bench.shares = [1.0] * 3
    bench.meanwhile = lambda: happens(bench.agent)
    said: list[str] = []
    with pytest.raises(Unavailable, match=words):
        await bench.bench().run(relus, Path(sys.executable), said.append)
    assert (bench.agent.released, bench.emptied) == (released, 1)
    assert said == ["something is left behind: nobody empties it"] * (happens is goes)
    assert bench.agent.lease is None or happens in (is_taken, goes), "what is another's is left to it"
    assert not [path for path in bench.repository.iterdir() if "@" in path.name]


async def test_whoever_stops_it_gets_the_clock_back(bench, relus):
    bench.shares, begun = [1.0] * 3, asyncio.Event()

    async def forever(*_: Any) -> Window:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    running = bench.bench()
    Triton.closed_loop, kept = forever, Triton.closed_loop  # type: ignore[method-assign,assignment]
    try:
        task = asyncio.create_task(running.run(relus, Path(sys.executable), print))
        await asyncio.wait_for(begun.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        Triton.closed_loop = kept  # type: ignore[method-assign]
    assert (bench.agent.released, bench.agent.lease, bench.emptied) == (1, None, 1)


async def test_a_node_that_serves_none_of_them_ends_it_and_a_folder_of_somebody_is_left_alone(bench, relus):
    bench.unready = True
    with pytest.raises(Unavailable, match="not ready"):
        await bench.bench().run(relus, Path(sys.executable), print)
    assert bench.emptied == 1
    theirs = bench.repository / stage_model("digits", 0, PLACES)
    theirs.mkdir()
    with pytest.raises(CatalogError, match="exists already"):
        await bench.bench().run(relus, Path(sys.executable), print)
    assert theirs.is_dir()


async def test_a_clock_that_is_never_reached_is_waited_for_so_long_only():
    agent, clock = Agent(stuck_mhz=210), SleepingClock()
    with pytest.raises(TrefoilError, match="runs at 210 MHz, not at 1410"):
        await HeldClock(agent, GPU, clock, HOLDER).run_at(1410)
    assert CLOCK_TIMEOUT_S < clock.monotonic_s() < CLOCK_TIMEOUT_S + 1


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "missing", "found"),
    [
        ({}, (), ("node0/gpu1", "7g.40gb", 1410)),
        ({"device": T4.name}, (), ("node0/gpu2", "whole", 1590)),
        ({"device": "node0/gpu2", "clock_mhz": 900}, (), ("node0/gpu2", "whole", 900)),
        ({"slice_type": "3g.20gb"}, (), ("node0/gpu1", "3g.20gb", 1410)),
        ({}, ("clock_lock gpu1: no root",), ("node0/gpu2", "whole", 1590)),
        ({"device": "Tesla P4"}, (), "it has no such GPU"),
        ({}, ("clock_lock: a vGPU's clocks are its host's",), "a vGPU's clocks are its host's"),
    ],
)
def test_it_is_measured_on_the_widest_slice_of_the_first_gpu_that_can_hold_a_clock(tmp_path, asked, missing, found):
    devices = tuple(DeviceStatus(f"node0/gpu{at}", kind) for at, kind in enumerate((P4, A100_40GB, T4)))
    node = NodeStatus("node0", devices=devices, missing=missing)
    settings = {"device": "", "slice_type": "", "clock_mhz": 0} | asked
    one = OperatorMeasurement(
        tmp_path / "digits" / "1" / "model.onnx", "h:1", window_s=1.0, replace=False, repository=tmp_path,
        state_dir=tmp_path, python=tmp_path, say=print, **settings,
    )  # fmt: skip
    if isinstance(found, str):
        with pytest.raises(SettingError, match=found):
            one._place(node)
    else:
        place = one._place(node)
        assert (place.device, place.shape.name, place.clock_mhz) == found
