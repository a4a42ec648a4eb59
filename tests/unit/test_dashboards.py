"""Dashboards and rules show what services write, and nothing else; the committed dashboards are what makes them."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from benchmarks.alerts import shortened
from benchmarks.alerts_faults import WORLDS

ROOT = Path(__file__).parents[2]
GRAFANA, PROMETHEUS = ROOT / "deploy" / "grafana", ROOT / "deploy" / "prometheus"
SCRAPED = {"job", "instance", "simulated", "worker", "cluster"}
OF_OTHERS = {
    "up": {"job"},
    "ALERTS": {"alertname", "alertstate", "cluster"},
    "haproxy_backend_active_servers": {"job", "proxy"},
}
MATCHED = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)(?:=~|!~|!=|=)\"")


@pytest.fixture(scope="module")
def panels() -> Iterator[ModuleType]:
    sys.path.insert(0, str(GRAFANA))
    yield importlib.import_module("panels")
    sys.path.remove(str(GRAFANA))


def rules() -> list[dict[str, Any]]:
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    return [rule for file in files for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted((GRAFANA / "dashboards").glob("*.json"))]


def expressions() -> list[str]:
    shown = [target["expr"] for board in dashboards() for panel in board["panels"] for target in panel["targets"]]
    marked = [mark["expr"] for board in dashboards() for mark in board["annotations"]["list"]]
    return [*shown, *marked, *(rule["expr"] for rule in rules())]


def test_the_committed_dashboards_are_what_makes_them(panels):
    made = dict(importlib.import_module("generate").files())
    found = {file: file.read_text() for file in (GRAFANA / "dashboards").glob("*")}
    assert found == made, "run: make dashboards"


def test_every_series_shown_is_of_the_chosen_data_source_and_clusters(panels):
    for board in dashboards():
        assert [each["name"] for each in board["templating"]["list"]][:2] == ["datasource", "cluster"]
        assert set(re.findall(r'"uid": "([^"]*)"', json.dumps(board))) == {"${datasource}", board["uid"]}
    shown = [target["expr"] for board in dashboards() for panel in board["panels"] for target in panel["targets"]]
    marked = [mark["expr"] for board in dashboards() for mark in board["annotations"]["list"]]
    for text in (*shown, *marked):
        assert len(panels.NAME.findall(text)) == text.count('{cluster=~"$cluster"'), text


def test_no_name_is_shown_that_nobody_writes(panels):
    known = panels.TABLE.keys() | panels.RECORDED.keys() | panels.OTHERS.keys()
    unknown = {name for text in expressions() for name in panels.metric_names(text)} - known
    assert not unknown
    named = {name for text in expressions() for name in panels.metric_names(text)}
    assert len(named) > 60, "the names were not found"


def test_no_label_is_asked_for_that_a_metric_lacks(panels):
    wrong = []
    for text in expressions():
        for name, inside in MATCHED.findall(text):
            metric = next(panels.metric_names(name), name)
            known = {"family", "node", "cluster"} if metric in panels.RECORDED else OF_OTHERS.get(metric, SCRAPED)
            if metric in panels.TABLE:
                known = SCRAPED | {*panels.TABLE[metric].labels}
            wrong += [f"{name}: {label}" for label in LABEL.findall(inside) if label not in known]
    assert not wrong


def test_panels_have_a_meaning_and_places_of_their_own():
    for board in dashboards():
        places = set()
        for panel in board["panels"]:
            assert panel["description"], panel["title"]
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & places, f"{board['uid']}: {panel['title']} lies on another one"
            places |= cells


def test_each_alert_is_tried_and_explained():
    """That it fires and clears is for promtool to see (tests/integration/test_alerts.py)."""
    files = (yaml.safe_load(file.read_text()) for file in (PROMETHEUS / "tests").glob("*.yml"))
    tried = [look for file in files for test in file["tests"] for look in test.get("alert_rule_test", ())]
    looks = [(look["alertname"], bool(look["exp_alerts"])) for look in tried]
    fires_then_clears = {name for (name, fired), after in followed(looks) if fired and not after}
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for alert in alerts():
        assert alert["alert"] in fires_then_clears | {"TrefoilWatchdog"}  # which never clears
        assert f"\n- `{alert['alert']}` (" in page


def test_each_alert_has_a_fault_that_is_played():
    """`make e2e-alerts` waits until it fires and clears."""
    faults = [fault for _, lanes in WORLDS for lane in lanes for fault in lane]
    assert {name for fault in faults for name in fault.alerts} == {alert["alert"] for alert in alerts()}
    assert all(fault.afterwards <= fault.alerts.keys() for fault in faults)


def test_rules_of_a_played_fault_are_shorter_and_else_the_same():
    found = {rule["alert"]: (rule, shortened(rule)) for rule in alerts()}
    assert found["TrefoilCarbonUnknown"][1] == found["TrefoilCarbonUnknown"][0] | {"for": "60000ms"}
    assert found["TrefoilNoLeader"][1]["for"] == "500ms"
    before, after = found["TrefoilGpuError"]
    assert before["expr"].replace("[15m]", "[15s]").replace("offset 15m", "offset 15s") == after["expr"]
    (rule,) = (rule for rule in rules() if rule.get("record") == "trefoil:token_slo_miss:ratio_rate5m")
    assert shortened(rule)["expr"] == rule["expr"].replace("[5m]", "[10s]")


def followed(looks: list[tuple[str, bool]]) -> Iterator[tuple[tuple[str, bool], bool]]:
    """Each look at an alert, and what the next one at the same alert saw."""
    for i, (name, fired) in enumerate(looks):
        after = next((later for other, later in looks[i + 1 :] if other == name), True)
        yield (name, fired), after


def test_a_job_for_each_service_at_the_port_that_up_gives_it():
    from trefoil.cli.run.scenario import Ports

    ports, names = Ports(), {"power_agent": "agent"}
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["job_name"]: (sd["names"], sd["port"]) for job in jobs for sd in job["dns_sd_configs"]}
    assert found.pop("haproxy") == (["haproxy"], 8404)
    assert found.pop("redis") == (["redis_exporter"], 9121)
    assert found == {
        name: ([names.get(name, name)], getattr(ports, f"{name}_metrics"))
        for name in ("carbon_feed", "controller", "power_agent", "dispatcher")
    }
