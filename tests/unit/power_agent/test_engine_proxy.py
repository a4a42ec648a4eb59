"""What an agent in a container may ask of the engine: its own slices, with nothing of the host but the repository."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from power_agent.runtimes import engine_proxy
from power_agent.runtimes.engine_proxy import EngineProxy, Rules
from tests.support.http_streams import HONOURED_OFFERS, INNER, front_reads

OWN = {"trefoil.cluster": "site1", "trefoil.node": "gpu7", "trefoil.tag": "gpu7-0.g1"}
OTHERS = {"trefoil.cluster": "site1", "trefoil.node": "gpu8"}
LIST = {"label": ["trefoil.cluster=site1", "trefoil.node=gpu7"]}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "out").symlink_to("/etc")
    return tmp_path / "models"


class Engine:
    """The real one: it has two containers, and says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, request.url.path))
        name = ([*request.url.path.removeprefix("/v1.41").split("/"), ""])[2]
        if name == "broken":
            return httpx.Response(500, stream=httpx.ByteStream(b'{"message": "no disk"}'))
        if name == "nobody":
            return httpx.Response(404, stream=httpx.ByteStream(b'{"message": "no such container"}'))
        labels = {"own": OWN, "looks": OWN, "others": OTHERS}.get(name, {})
        config = {"Labels": labels, "NetworkDisabled": name == "looks"}
        text = json.dumps({"Config": config, "Labels": labels})
        return httpx.Response(200, stream=httpx.ByteStream(text.encode()))


async def ask(
    models: Path, method: str, url: str, body: Any = None, text: str | None = None
) -> tuple[httpx.Response, Engine]:
    engine = Engine()
    real = httpx.AsyncClient(transport=httpx.MockTransport(engine), base_url="http://engine")
    proxy = EngineProxy(Rules("site1", "gpu7", [models]), real)
    async with real, httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://proxy") as client:
        return await client.request(method, url, json=body, content=text), engine


def container(models: Path, *, labels: dict[str, str] = OWN, user: str = "65534:65534", **host: Any) -> dict[str, Any]:
    usual = {
        "NetworkMode": "trefoil-site1-gpu7",
        "Mounts": [{"Type": "bind", "Source": str(models), "Target": str(models), "ReadOnly": True}],
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "Privileged": False,
        "Binds": None,
    }
    return {"Labels": labels, "User": user, "HostConfig": usual | host}


@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("GET", "/version"),
        ("GET", "/v1.41/info"),
        ("GET", "/v1.41/images/tritonserver:24.10-py3/json"),
        ("GET", f"/v1.41/containers/json?all=1&filters={json.dumps(LIST)}"),
        ("POST", "/v1.41/containers/own/start"),
        ("POST", "/v1.41/containers/own/kill?signal=SIGTERM"),
        ("DELETE", "/v1.41/containers/own?v=True&force=True"),
        ("GET", "/v1.41/networks/own"),
        ("GET", "/v1.41/containers/nobody/json"),
    ],
)
async def test_what_the_agent_needs_is_passed_on(models: Path, method: str, url: str) -> None:
    answer, engine = await ask(models, method, url)
    assert engine.asked[-1] == (method, url.partition("?")[0])
    assert answer.status_code == (404 if "nobody" in url else 200)


@pytest.mark.parametrize(
    ("method", "url", "why"),
    [
        ("GET", "/v1.41/containers/json", "it lists containers of others"),
        ("GET", '/containers/json?filters={"label":["trefoil.node=gpu7"]}', "it lists containers of others"),
        ("GET", "/v1.41/containers/others/json", "it is not this agent's"),
        ("POST", "/v1.41/containers/others/kill", "it is not this agent's"),
        ("DELETE", "/v1.41/containers/others", "it is not this agent's"),
        ("GET", "/v1.41/networks/others", "it is not this agent's"),
        ("POST", "/v1.41/containers/json/kill", "it is not this agent's"),
        ("DELETE", "/v1.41/containers/create", "it is not this agent's"),
        ("POST", "/v1.41/containers/broken/kill", "it is not this agent's"),
        ("POST", "/v1.41/containers/own/exec", "an agent never asks that"),
        ("GET", "/v1.41/containers/own/archive?path=/", "an agent never asks that"),
        ("POST", "/v1.41/images/create?fromImage=x", "an agent never asks that"),
        ("POST", "/v1.41/build", "an agent never asks that"),
        ("GET", "/v1.41/images/%2e%2e/containers/others/json", "its path is none"),
        ("POST", "/v1.41/swarm/init", "an agent never asks that"),
    ],
)
async def test_everything_else_is_refused(models: Path, method: str, url: str, why: str) -> None:
    answer, engine = await ask(models, method, url)
    assert answer.status_code == 403
    assert why in answer.json()["message"]
    assert not [asked for asked in engine.asked if asked[0] != "GET"]


async def test_a_slice_may_be_made(models: Path) -> None:
    more = {"NetworkingConfig": {"EndpointsConfig": {"trefoil-site1-gpu7": {}}}}
    for given in ({}, more, {"NetworkingConfig": None}):
        answer, _ = await ask(models, "POST", "/v1.41/containers/create?name=x", container(models) | given)
        assert answer.status_code == 200


async def test_a_container_joins_no_other_network(models: Path) -> None:
    body = container(models) | {"NetworkingConfig": {"EndpointsConfig": {"bridge": {}}}}
    answer, engine = await ask(models, "POST", "/v1.41/containers/create", body)
    assert answer.status_code == 403
    assert "NetworkingConfig names 'bridge'" in answer.json()["message"]
    assert not engine.asked


@pytest.mark.parametrize("verb", ["start", "kill", "wait"])
async def test_what_has_been_judged_is_not_changed_by_a_later_body(models: Path, verb: str) -> None:
    """Engines before 25 took a HostConfig at the start, by an API before 1.24."""
    answer, engine = await ask(models, "POST", f"/v1.23/containers/own/{verb}", {"Privileged": True})
    assert (answer.status_code, answer.json()["message"].endswith(": it has a body")) == (403, True)
    assert not engine.asked


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"labels": OTHERS}, "does not carry the labels"),
        ({"user": ""}, "its user is ''"),
        ({"user": "0:0"}, "its user is '0:0'"),
        ({"user": "00"}, "its user is '00'"),  # the engine's number of it is 0, as of the next
        ({"user": "+0:0"}, "its user is '+0:0'"),
        ({"user": "toor"}, "its user is 'toor'"),
        ({"MaskedPaths": []}, "HostConfig.MaskedPaths"),
        ({"ReadonlyPaths": []}, "HostConfig.ReadonlyPaths"),
        ({"Privileged": True}, "HostConfig.Privileged"),
        ({"Binds": ["/:/host"]}, "HostConfig.Binds"),
        ({"CapAdd": ["SYS_ADMIN"]}, "HostConfig.CapAdd"),
        ({"CapDrop": None}, "HostConfig.CapDrop is None"),
        ({"Devices": [{"PathOnHost": "/dev/sda"}]}, "HostConfig.Devices"),
        ({"PidMode": "host"}, "HostConfig.PidMode"),
        ({"IpcMode": "host"}, "HostConfig.IpcMode is 'host'"),
        ({"NetworkMode": "host"}, "HostConfig.NetworkMode is 'host'"),
        ({"SecurityOpt": ["apparmor=unconfined"]}, "HostConfig.SecurityOpt"),
        ({"LogConfig": {"Type": "syslog"}}, "HostConfig.LogConfig.Type is 'syslog'"),
        ({"Mounts": [{"Type": "bind", "Source": "/etc", "ReadOnly": True}]}, "/etc is not below"),
        ({"Mounts": [{"Type": "bind", "Source": "{models}/../..", "ReadOnly": True}]}, "is not below"),
        ({"Mounts": [{"Type": "bind", "Source": "{models}/out", "ReadOnly": True}]}, "/etc is not below"),
        ({"Mounts": [{"Type": "bind", "Source": "{models}", "ReadOnly": False}]}, "not a read-only bind mount"),
        ({"Mounts": [{"Type": "volume", "Source": "{models}", "ReadOnly": True}]}, "not a read-only bind mount"),
    ],
)
async def test_a_container_that_reaches_more_is_refused(models: Path, changes: dict[str, Any], why: str) -> None:
    for mount in changes.get("Mounts", []):
        mount["Source"] = mount["Source"].replace("{models}", str(models))
    answer, engine = await ask(models, "POST", "/v1.41/containers/create", container(models, **changes))
    assert answer.status_code == 403
    assert why in answer.json()["message"]
    assert not engine.asked


@pytest.mark.parametrize(
    ("before", "more", "why"),
    [
        ('"HostConfig": {', '"hostconfig": {"Privileged": true}, ', "a key occurs twice, in any case"),
        ('"HostConfig": {', '"HostConfig": {"Privileged": true}, ', "a key occurs twice, in any case"),
        ('"HostConfig": {', '"HoſtConfig": {"Privileged": true}, ', "a key occurs twice, in any case"),
        ('"Source": ', '"source": "/", ', "a key occurs twice, in any case"),
        ('"ReadOnly": ', '"READONLY": false, ', "a key occurs twice, in any case"),
        ('"User": ', '"user": "0", ', "a key occurs twice, in any case"),
        ('"Labels": ', '"x": ' + 100_000 * "[", "it cannot be read"),
    ],
)
async def test_a_key_that_the_engine_could_take_for_a_judged_one_is_refused(
    models: Path, before: str, more: str, why: str
) -> None:
    text = json.dumps(container(models))
    assert before in text
    answer, engine = await ask(models, "POST", "/containers/create", text=text.replace(before, more + before))
    assert answer.status_code == 403
    assert why in answer.json()["message"]
    assert not engine.asked


async def test_what_is_never_started_has_no_host_config_in_any_spelling(models: Path) -> None:
    for name, status in (("HostConfig", 200), ("hostConfig", 403)):
        body = {"Labels": OWN, "NetworkDisabled": True, name: {"NetworkMode": "none"}}
        answer, _ = await ask(models, "POST", "/containers/create", body)
        assert answer.status_code == status, answer.text
    assert "'hostConfig' is spelt 'HostConfig'" in answer.json()["message"]


@pytest.mark.parametrize("offer", HONOURED_OFFERS)
async def test_what_stands_in_the_body_of_an_upgrade_offer_is_no_request(
    offer: tuple[bytes, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(engine_proxy.uvicorn, "run", lambda _, **given: started.update(given))
    argv = ["engine_proxy", "--socket", str(tmp_path / "s"), "--node", "gpu7", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", argv)
    engine_proxy.main()
    config = uvicorn.Config(engine_proxy.EngineProxy, **started)
    config.load()
    lines = [b"POST /v1.41/containers/own/start HTTP/1.1", b"Host: x", *offer, b"Content-Length: %d" % len(INNER), b""]
    reading = await front_reads([b"\r\n".join([*lines, INNER + INNER])], config.http_protocol_class)
    assert [body for _, _, body in reading.requests] == [INNER, b"{}"]


async def test_a_request_whose_body_breaks_off_is_not_passed_on(models: Path) -> None:
    engine = Engine()
    events = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    scope = {
        "type": "http",
        "method": "POST",
        "raw_path": b"/v1.41/containers/own/start",
        "query_string": b"",
        "headers": [],
    }

    async def receive() -> Any:
        return next(events)

    async def send(_: Any) -> None:
        raise AssertionError("it has left")

    async with httpx.AsyncClient(transport=httpx.MockTransport(engine), base_url="http://engine") as real:
        await EngineProxy(Rules("site1", "gpu7", [models]), real)(scope, receive, send)
    assert not engine.asked


@pytest.mark.parametrize("url", ["/v1.41/containers/own/json", "/v1.41/version"])
async def test_an_engine_that_does_not_answer_is_a_bad_gateway(
    models: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Engine, request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no engine", request=request)

    monkeypatch.setattr(Engine, "__call__", refuse)
    answer, _ = await ask(models, "GET", url)
    assert (answer.status_code, answer.json()["message"]) == (502, "the engine does not answer: no engine")


async def test_what_looks_into_an_image_is_never_started(models: Path) -> None:
    for method, path, status in (("POST", "/start", 403), ("HEAD", "/archive", 200), ("DELETE", "", 200)):
        answer, _ = await ask(models, method, f"/v1.41/containers/looks{path}")
        assert answer.status_code == status
