"""The live page: what it shows, whom it lets in, and that no viewer costs the controller more than its bounds."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.page import frames, server
from controller.page.frames import VIEWERS_MAX, Frames, OwnReads
from controller.page.picture import DEVICES_SHOWN, JOBS_SHOWN, picture
from controller.page.server import ASKED_BYTES_MAX, CONNECTIONS_MAX, PageComponent
from controller.role.leader_answers import LeaderAnswers
from controller.settings import ControllerSettings
from protos.controller.v1 import controller_pb2 as pb
from protos.types.v1 import plan_pb2
from tests.support.certificates import Authority
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, Factors, Method, Series
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.errors import SettingError, StateUnavailable
from trefoil.core.fleet import DeviceState, DeviceStatus, Hosted, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.jobs.planned import PlannedHour, PlannedJob, PlannedJobs
from trefoil.core.objective import ActMode, Budget, Objective, ObjectiveMode
from trefoil.core.plan import DecisionRecord, Plan, RolloutState
from trefoil.overview.known import overview_of, read_answers
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock

SERIES = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)
KEYS = (SliceKey("node0/gpu0", "3g.20gb", 0, 4), SliceKey("node0/gpu0", "2g.10gb", 4, 2))
HOSTED = (Hosted("digits", "digits-l", 4), Hosted("digits", "digits-m", 3))
AWAKE = DeviceStatus(
    "node0/gpu0", A100_40GB, DeviceState.AWAKE,
    tuple(SliceStatus(k, state=SliceState.READY, hosted=(h,)) for k, h in zip(KEYS, HOSTED, strict=True)),
    clock_mhz=1410, power_w=231.5,
)  # fmt: skip
NODE = NodeStatus("node0", simulated=True, devices=(AWAKE, DeviceStatus("node0/gpu1", A100_40GB, DeviceState.ASLEEP)))
HOUR = {"requests": 1000.0, "joules": 90.0, "grams": 9.0, "base_joules": 110.0, "base_grams": 12.0}


class Controller:
    """Answers what the page asks, and counts the questions."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.node, self.cluster, self.why = NODE, "demo", "carbon rose by 30 %; exact: so and so"
        self.intensity_g_per_kwh = 249.0
        self.hour, self.budget_spent = HOUR, False
        self.jobs: PlannedJobs | None = None

    async def GetPlan(self, request: Any, context: Any) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        plan = codec.to_proto(Plan(revision=Revision(1, 4), policy="exact"))
        rollout = plan_pb2.Rollout(target=codec.to_proto(Revision(1, 4)), state=int(RolloutState.DONE))
        return pb.GetPlanResponse(plan=plan, rollout=rollout, mode=int(ActMode.ACT))

    async def GetServed(self, request: Any, context: Any) -> Any:
        row = {"family": "digits", "slo_ms": 75.0, "rate_per_s": 20.0, "answered": 1200, "latency_ms_p95": 43.2}
        found = pb.Served(**row, slo_attainment=0.941, accuracy=0.981)
        return pb.GetServedResponse(window_s=60.0, served=[found], base_basis="digits-l everywhere")

    async def GetFleet(self, request: Any, context: Any) -> Any:
        reading = CarbonReading(SERIES, intensity_g_per_kwh=self.intensity_g_per_kwh, provider="trace")
        now_s = WallClock().now_s()
        bands = [CarbonBand(now_s + 60 * n, now_s + 60 * n + 60, 90, 100.0 + n, 300) for n in range(10)]
        return pb.GetFleetResponse(
            cluster=self.cluster, nodes=[codec.to_proto(self.node)], carbon=[codec.to_proto(reading)],
            carbon_forecasts=[codec.to_proto(CarbonForecast(SERIES, "mean", now_s, tuple(bands)))], workers=["d:0"],
            jobs=codec.to_proto(self.jobs) if self.jobs is not None else None,
        )  # fmt: skip

    async def GetObjectives(self, request: Any, context: Any) -> Any:
        wanted = Objective("digits", ObjectiveMode.INSTANT, slo_ms=75, slo_quantile=0.95, min_accuracy=0.97)
        return pb.GetObjectivesResponse(objectives=[codec.to_proto(wanted)])

    async def GetBudgets(self, request: Any, context: Any) -> Any:
        spent = pb.BudgetUse(budget=codec.to_proto(Budget("acme", grams_per_day=5.0)), grams=6.0, joules=9.0, rung=3)
        return pb.GetBudgetsResponse(budgets=[spent] if self.budget_spent else [])

    async def GetReport(self, request: Any, context: Any) -> Any:
        return pb.GetReportResponse(hours=[pb.FamilyHour(family="digits", sums=self.hour)])

    async def ListDecisions(self, request: Any, context: Any) -> Any:
        record = DecisionRecord("1.000001", Revision(1, 4), "carbon", at_s=100.0, why=self.why)
        found = replace(record, versions={"outcome": "new_plan", "effect": "reroute"})
        return pb.ListDecisionsResponse(decisions=[codec.to_proto(found)])


@asynccontextmanager
async def served(
    controller: Any, folder: Path, token: str = "", read: str = "", **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, PageComponent]]:
    """The page of a controller, and a client of it that has shown no token."""
    for name, secret in (("token", token), ("read_token", read)):
        if secret:
            path = folder / name
            path.touch(0o600)
            path.write_text(f"{secret}\n")
            settings[f"{name}_file"] = path
    given = {"state_dir": folder, "page_address": "127.0.0.1:0"} | settings
    page = PageComponent(ControllerSettings(**given), controller, WallClock())
    await page.init()
    running = asyncio.create_task(page.run())
    scheme = "https" if "tls_key" in settings else "http"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=f"{scheme}://127.0.0.1:{page.port}", limits=limits, trust_env=False, timeout=20, verify=False
    ) as client:
        yield client, page
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await page.shutdown()


async def frame(client: httpx.AsyncClient, wanted: Callable[[str], bool] = bool) -> str:
    """The first frame that is as wanted."""
    async with client.stream("GET", "/events") as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and wanted(html := json.loads(line.removeprefix("data: "))):
                return str(html)
    raise AssertionError("the stream ended")


def values(html: str) -> dict[str, str]:
    """Texts of a frame by their names; of several of a name the first."""
    found = re.findall(r'data-value="(\w+)">([^<]*)<', html)
    return dict(reversed(found))


async def test_the_page_shows_the_overview_of_status(tmp_path: Path) -> None:
    controller = Controller()
    async with served(controller, tmp_path) as (client, _):
        shown = values(await frame(client))
        overview = overview_of(await read_answers(OwnReads(controller), WallClock().now_s(), decisions=1))
    row, saving = overview["served"]["by_class"][0], overview["saving"]
    assert shown["carbon"] == f"{overview['carbon'][0]['intensity_g_per_kwh']:.0f}" == "249"
    assert shown["forecast"] == "100 to 109"
    assert (shown["rate"], shown["p95"], shown["in_slo"]) == (f"{row['rate_per_s']:.1f}", "43", "94.1%")
    assert shown["accuracy"] == f"{row['accuracy']:.4f}"
    assert saving["saving_pct"] is None
    assert shown["withheld"] == saving["withheld"]
    assert shown["grams"] == f"{saving['grams']:.2f}"
    assert "saving" not in shown
    assert shown["why"] == "carbon rose by 30 %"
    assert (shown["variant"], shown["clock"], shown["state"]) == ("digits-l", "1410 MHz", "awake")


async def test_a_step_of_carbon_changes_the_next_frame(tmp_path: Path) -> None:
    controller = Controller()
    async with served(controller, tmp_path) as (client, _):
        stepped = asyncio.create_task(frame(client, lambda html: values(html)["carbon"] == "410"))
        await frame(client)
        controller.intensity_g_per_kwh = 410.0
        async with asyncio.timeout(20):
            assert values(await stepped)["carbon"] == "410"


async def overview(controller: Controller) -> dict[str, Any]:
    return overview_of(await read_answers(OwnReads(controller), WallClock().now_s(), decisions=1))


async def test_a_saving_stands_beside_what_base_would_have_emitted() -> None:
    found = await overview(Controller())
    found["saving"] |= {"withheld": "", "saving_pct": 25.0}
    shown = picture(found, 0.0)["saving"]
    assert (shown["grams"], shown["base"], shown["pct"], shown["worse"]) == ("9.00", "12.00", "25.0 % less", False)
    found["saving"]["saving_pct"] = -3.0
    assert picture(found, 0.0)["saving"]["pct"] == "3.0 % more"


async def test_boxes_are_as_wide_as_slices_and_a_sleeping_gpu_says_so() -> None:
    shown = picture(await overview(Controller()), 0.0)
    first, second = shown["devices"]
    assert [(one["variants"], one["parts"]) for one in first["slices"]] == [("digits-l", 4), ("digits-m", 2)]
    assert first["free"] == 2
    assert first["slices"][0]["colour"] != first["slices"][1]["colour"]
    assert (first["asleep"], second["asleep"], second["slices"]) == (False, True, [])
    assert shown["simulated"]
    assert shown["families"][0]["late"]


async def test_a_budget_that_is_spent_is_a_trouble() -> None:
    controller = Controller()
    assert picture(await overview(controller), 0.0)["troubles"] == []
    controller.budget_spent = True
    line = "requests are refused: budget of acme, 5 g a day: 120% spent, refused"
    assert picture(await overview(controller), 0.0)["troubles"] == [line]


async def test_planned_jobs_are_shown_by_deadline_over_their_hours(tmp_path: Path) -> None:
    controller, now_s = Controller(), WallClock().now_s()
    starts = (now_s, 50.0), (now_s + 7200.0, 100.0)
    hours = tuple(PlannedHour(at_s, at_s + 3600.0, 9.0, 1.0, carbon) for at_s, carbon in starts)
    jobs = [
        PlannedJob(f"f/job{n}", 900, hours, n > 0, now_s, f"prospect {n}", 2.0, 4.0, 2.0, now_s + 86_400.0 - n)
        for n in range(JOBS_SHOWN + 2)
    ]
    controller.jobs = PlannedJobs(Revision(1, 1), now_s, now_s + 86_400.0, tuple(jobs))
    shown = picture(await overview(controller), now_s)["jobs"]
    assert (shown["count"], shown["hidden"], shown["queue"][0]["name"]) == (JOBS_SHOWN + 2, 2, f"job{JOBS_SHOWN + 1}")
    assert shown["hours"] == [(50.0, True), (100.0, True)]
    assert shown["saves"] == "saves 24 g (50%) against run at once, about nothing against run evenly"
    assert picture(await overview(controller), now_s + 86_401.0)["jobs"] is None, "the plan has ended"
    async with served(controller, tmp_path) as (client, _):
        html = await frame(client, lambda html: "Jobs that wait" in html)
    assert "prospect 1" in html
    assert "and 2 more" in html


async def test_a_large_fleet_is_cut() -> None:
    controller = Controller()
    devices = tuple(replace(AWAKE, device=f"node0/gpu{n}") for n in range(DEVICES_SHOWN + 7))
    controller.node = replace(NODE, devices=devices)
    shown = picture(await overview(controller), 0.0)
    assert (len(shown["devices"]), shown["devices_hidden"]) == (DEVICES_SHOWN, 7)


async def test_what_stands_in_the_system_is_text_and_no_markup(tmp_path: Path) -> None:
    controller = Controller()
    controller.why = controller.cluster = '<script src="//evil"></script>'
    async with served(controller, tmp_path) as (client, _):
        html = await frame(client)
    assert "<script" not in html
    assert "&lt;script" in html


async def test_a_standby_says_who_leads(tmp_path: Path) -> None:
    async with served(LeaderAnswers(Controller(), lambda: "host7:41"), tmp_path) as (client, _):
        shown = values(await frame(client))
    assert shown == {"notice": "this controller stands by, host7:41 leads. Remedy: ask that one"}


@pytest.mark.parametrize(
    ("error", "notice"), [(StateUnavailable("Redis does not answer"), "Redis"), (KeyError("x"), frames.BUG)]
)
async def test_what_fails_is_said_above_the_last_picture_and_ends_nothing(
    tmp_path: Path, error: Exception, notice: str
) -> None:
    controller = Controller()
    async with served(controller, tmp_path) as (client, _):
        await frame(client)
        controller.error = error
        shown = values(await frame(client, lambda html: "notice" in values(html)))
        assert notice in shown["notice"]
        assert shown["carbon"] == "249"
        controller.error = None
        await frame(client, lambda html: "notice" not in values(html))


async def test_without_viewers_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PERIOD_S", 0.01)
    monkeypatch.setattr(frames, "REST_RATIO", 0.0)
    controller = Controller()
    async with served(controller, tmp_path) as (client, _):
        await client.get("/")
        assert controller.asked == 0
        await frame(client)
        await settled(lambda: controller.asked)


async def test_a_viewer_beside_others_sees_their_frame_at_once_and_the_first_one_no_old_frame(tmp_path: Path) -> None:
    controller, clock = Controller(), WallClock()
    drawn = Frames(OwnReads(controller), clock)
    running = asyncio.create_task(drawn.run())
    async with asyncio.timeout(20):
        with drawn.viewer():
            first = await anext(drawn.watch())
            running.cancel()  # no frame comes after this one
            with drawn.viewer():
                async with asyncio.timeout(1):
                    assert await anext(drawn.watch()) == first
        controller.intensity_g_per_kwh = 410.0
        with drawn.viewer():
            running = asyncio.create_task(drawn.run())
            assert values(await anext(drawn.watch()))["carbon"] == "410"
    running.cancel()


async def settled(count: Callable[[], int]) -> None:
    """Wait until a count stays."""
    async with asyncio.timeout(20):
        before = -1
        while before != count():
            before = count()
            await asyncio.sleep(0.2)


async def test_the_token_is_asked_for_in_each_way_that_a_browser_has(tmp_path: Path) -> None:
    async with served(Controller(), tmp_path, token="all", read="look") as (client, page):
        assert (await client.get("/")).status_code == 401
        for wrong in ("", "x", "é"):
            assert (await client.get("/", params={"token": wrong})).status_code == 401
            assert (await client.get("/", auth=("any", wrong))).status_code == 401
        assert (await client.get("/", headers={"authorization": "Basic %%%"})).status_code == 401
        for right in ("all", "look"):
            assert (await client.get("/events", headers={"authorization": f"Basic {right}"})).status_code == 401
            assert (await client.get("/", auth=("any", right))).status_code == 200
            assert (await client.get("/", headers={"authorization": f"Bearer {right}"})).status_code == 200
        linked = await client.get("/", params={"token": "look"})
        assert (linked.status_code, linked.headers["location"]) == (303, "/")
        assert "HttpOnly" in linked.headers["set-cookie"]
        assert f"trefoil_{page.port}" in client.cookies
        assert (await client.get("/")).status_code == 200
        assert values(await frame(client))["carbon"] == "249"


async def test_without_a_token_the_page_answers_to_names_of_this_machine_alone(tmp_path: Path) -> None:
    async with served(Controller(), tmp_path) as (client, page):
        for name in ("localhost", "127.0.0.1", "[::1]"):
            assert (await client.get("/", headers={"host": f"{name}:{page.port}"})).status_code == 200
        for name in ("evil.example", "localhost.evil.example", ""):
            assert (await client.get("/", headers={"host": name})).status_code == 421


async def test_every_answer_forbids_frames_and_other_hosts_and_other_methods_are_refused(tmp_path: Path) -> None:
    async with served(Controller(), tmp_path, token="all") as (client, _):
        auth = ("any", "all")
        asked: list[tuple[str, str, int, Any]] = [
            ("GET", "/", 200, auth), ("GET", "/live.js", 200, auth), ("GET", "/nix", 404, auth),
            *((method, path, 405, auth) for method in ("POST", "PUT") for path in ("/", "/events", "/live.js")),
            ("GET", "/", 401, None),
            ("GET", "/../settings.py", 404, auth), ("GET", "/%2e%2e/app.py", 404, auth), ("POST", "/", 401, None),
        ]  # fmt: skip
        for method, path, code, given in asked:
            answer = await client.request(method, path, auth=given)
            assert (method, path, answer.status_code) == (method, path, code)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-frame-options"] == "DENY"
        page = (await client.get("/", auth=auth)).text
    assert not re.search(r"""(src|href)=["'](?:\w+:)?//""", page), "nothing of another host"
    assert " style=" not in page, "the policy forbids it"


async def test_a_thousand_viewers_get_what_the_bounds_allow(tmp_path: Path) -> None:
    codes: list[int] = []

    async def view(client: httpx.AsyncClient, stay: asyncio.Event) -> None:
        try:
            async with client.stream("GET", "/events") as answer:
                codes.append(answer.status_code)
                if answer.status_code == 200:
                    await stay.wait()
        except httpx.TransportError:
            codes.append(0)

    most = 0
    async with served(Controller(), tmp_path) as (client, page):
        stay = asyncio.Event()
        viewers = [asyncio.create_task(view(client, stay)) for _ in range(1000)]
        assert page._server is not None
        async with asyncio.timeout(120):
            while len(codes) < len(viewers):
                most = max(most, len(page._server.server_state.connections))
                await asyncio.sleep(0.01)
        assert codes.count(200) == VIEWERS_MAX
        assert set(codes) <= {200, 503, 0}
        assert most <= CONNECTIONS_MAX
        stay.set()
        await asyncio.gather(*viewers)
        await until(lambda: frame(client))


async def until(ask: Callable[[], Awaitable[str]]) -> str:
    """Ask until it is answered: those who left are noticed within moments."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await ask()
            except (AssertionError, httpx.TransportError):
                await asyncio.sleep(0.1)


async def test_a_viewer_who_does_not_read_is_let_go_and_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STALLED_S", 0.3)
    monkeypatch.setattr(frames, "PERIOD_S", 0.01)
    controller = Controller()
    controller.cluster = "x" * 2_000_000
    async with served(controller, tmp_path) as (client, page):
        loop, stalled = asyncio.get_running_loop(), socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        await loop.sock_connect(stalled, ("127.0.0.1", page.port))
        await loop.sock_sendall(stalled, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(3):
            await frame(client)
        assert page._server is not None
        connections = page._server.server_state.connections
        await until_true(lambda: not any(one.client == stalled.getsockname() for one in connections))
        await frame(client)
        stalled.close()


async def test_a_connection_that_asks_nothing_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENT_S", 0.3)
    async with served(Controller(), tmp_path) as (_, page):
        silent, writer = await asyncio.open_connection("127.0.0.1", page.port)
        async with asyncio.timeout(20):
            assert await silent.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("begun", "drop"),
    [
        (b"G", b""),
        (b"GET / HTTP/1.1\r\nHost: local", b""),
        (b"GET / HTTP/1.1\r\nHost: local", b"x"),  # a drop at a time is not a request either
        (b"GET /nix HTTP/1.1\r\nHost: localhost\r\n\r\nG", b""),
    ],
)
async def test_a_connection_that_does_not_ask_to_the_end_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes, drop: bytes
) -> None:
    monkeypatch.setattr(server, "SILENT_S", 0.3)
    async with served(Controller(), tmp_path) as (client, page):
        reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
        writer.write(begun)
        ended = asyncio.create_task(reader.read())
        async with asyncio.timeout(5):
            while not ended.done():
                await asyncio.wait([ended], timeout=0.1)
                writer.write(drop)
        await asyncio.gather(ended, return_exceptions=True)
        writer.close()
        assert (await client.get("/")).status_code == 200


async def test_a_request_without_an_end_is_cut(tmp_path: Path) -> None:
    async with served(Controller(), tmp_path) as (client, page):
        reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * (ASKED_BYTES_MAX + 1))
        async with asyncio.timeout(20):
            [ended] = await asyncio.gather(reader.read(), return_exceptions=True)
        assert ended == b"" or isinstance(ended, ConnectionError)
        writer.close()
        assert (await client.get("/")).status_code == 200


async def until_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.05)


async def test_the_page_speaks_tls_where_the_admin_port_does_and_asks_browsers_for_no_certificate(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    settings = authority.server().settings(authority)
    async with served(Controller(), tmp_path, token="all", **settings) as (client, _):
        assert (await client.get("/")).status_code == 401
        linked = await client.get("/", params={"token": "all"})
        assert "Secure" in linked.headers["set-cookie"]
        assert values(await frame(client))["carbon"] == "249"


async def test_beyond_loopback_it_needs_tls_and_a_token(tmp_path: Path) -> None:
    settings = ControllerSettings(state_dir=tmp_path, page_address="0.0.0.0:0")
    with pytest.raises(SettingError, match="needs TLS and a token"):
        await PageComponent(settings, Controller(), WallClock()).init()
