"""The Helm chart, as far as it can be looked at without Helm; the rest is `make e2e-chart`."""

import json
import re
from pathlib import Path

import pytest
import yaml

from power_agent.runtimes.kubernetes_pod import INSTANCE_LABEL, NAME, NAME_LABEL
from power_agent.settings import PowerAgentSettings
from power_agent.triton.slice_launch import GPUS_MAX, PORTS_PER_GPU

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "trefoil"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {path.name: path.read_text() for path in CHART.glob("templates/**/*.*")}


def test_files_of_others_are_there():
    links = [path for path in CHART.rglob("*") if path.is_symlink()]
    assert {path.name for path in links} >= {"controller.toml", "haproxy.cfg", "rules", "dashboards", "redis.sh"}
    assert [path for path in links if not path.exists()] == []


def test_every_value_is_in_the_schema_and_used_by_a_template():
    said = set(SCHEMA["properties"]) - {"global"}
    assert said == set(VALUES)
    used = "".join(TEMPLATES.values())
    for name, value in VALUES.items():
        assert f".Values.{name}" in used, name
        if isinstance(value, dict) and "properties" in SCHEMA["properties"][name]:
            assert set(SCHEMA["properties"][name]["properties"]) == set(value), name
            assert SCHEMA["properties"][name]["additionalProperties"] is False, name


def test_templates_ask_for_no_value_that_is_not_there():
    for name, text in TEMPLATES.items():
        for path in re.findall(r"\.Values((?:\.\w+)+)", text):
            found = VALUES
            for key in path[1:].split("."):
                assert key in found, f"{name}: .Values{path}"
                found = found[key]


@pytest.mark.parametrize("name", ["control.yaml", "dispatcher.yaml", "simulated.yaml", "redis.yaml", "haproxy.yaml"])
def test_pods_are_restricted(name):
    assert 'include "trefoil.pod"' in TEMPLATES[name]
    containers = re.findall(r"^ +image: ", TEMPLATES[name], re.M)
    assert len(containers) == TEMPLATES[name].count('include "trefoil.container"')


def test_a_dispatcher_has_longer_to_end_than_it_takes():
    told = (CHART / "files" / "dispatcher.toml").read_text()
    drain_s, grace_s = (float(re.search(rf"^{key} = (.+)$", told, re.M)[1]) for key in ("drain_s", "stop_grace_s"))
    assert VALUES["dispatcher"]["terminationGracePeriodSeconds"] > drain_s + 2 * grace_s + 4


def test_agents_that_make_pods_have_the_verbs_that_the_runtime_uses_and_no_more():
    verbs = dict(re.findall(r"resources: \[(\S+)\], verbs: \[([\w, ]+)\]", TEMPLATES["gpu.yaml"]))
    assert verbs == {"pods": "create, delete, get, list, watch", "pods/log": "get", "nodes": "get"}


def test_dispatchers_reach_each_port_of_a_slices_pod_and_pods_have_the_labels_that_are_selected():
    policy = TEMPLATES["network.yaml"].partition("$name }}-slices")[2]
    base = PowerAgentSettings().triton_port_base
    assert f"port: {base}, endPort: {base + PORTS_PER_GPU * GPUS_MAX - 1}" in policy
    assert f"{NAME_LABEL}: {NAME}, {INSTANCE_LABEL}: {{{{ .Release.Name }}}}" in policy
    assert "egress: []" in policy


def test_variables_of_agents_are_settings():
    given = re.findall(r"TREFOIL_POWER_AGENT_(\w+)", TEMPLATES["gpu.yaml"] + TEMPLATES["_agent.tpl"])
    assert {name.lower() for name in given} <= set(PowerAgentSettings.model_fields)
    assert len(given) >= 10


def test_no_variable_outranks_a_setting_that_the_values_have_too():
    given = {name for text in TEMPLATES.values() for name in re.findall(r"name: (TREFOIL_\w+)", text)}
    assert {name for name in given if re.search("ZONE|PROVIDER|DEVICES", name)} == set()
    assert "| regexReplaceAll" not in "".join(TEMPLATES.values())  # a pipe gives the text as what is put in


def test_the_clusters_name_server_takes_the_place_of_the_swarms():
    config = (CHART / "files" / "haproxy.cfg").read_text()
    assert config.count("nameserver dns 127.0.0.11:53") == 1
    assert config.count("@dispatcher:") == config.count("dispatcher:80") == 4
    assert "^node_socket" in TEMPLATES["config.yaml"]
    assert re.search("^node_socket", (CHART / "files" / "power_agent.toml").read_text(), re.M)
