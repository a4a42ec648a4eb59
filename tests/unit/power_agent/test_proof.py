"""Whose a running Triton is: only what agrees in everything with its slice is taken for ours."""

from dataclasses import replace

import pytest

from power_agent.slices.core.proof import Expected, Running, objection, restricted_key, split_tag, uncut_keys
from trefoil.core.device_types import device_type
from trefoil.core.fleet import SliceKey

KEY = SliceKey("node0/gpu1", "1g.5gb+me", 6, 1)
NAME = "node0-gpu1-1g.5gb_me-6"
EXPECTED = Expected(KEY, "prod/node0", "MIG-1", 8228, tls=False)
ARGV = (
    "/opt/tritonserver",
    f"--id={NAME}",
    f"--model-repository=/var/lib/trefoil/slices/{NAME}",
    "--grpc-port=8228",
    "--metrics-port=8229",
    "--grpc-restricted-protocol=model-repository,logging:agent=secret",
)
OURS = Running(f"{NAME}.g7", "prod/node0", ARGV, "MIG-1")


def without(word: str) -> tuple[str, ...]:
    return tuple(each for each in ARGV if not each.startswith(word))


def test_a_triton_that_agrees_in_everything_is_proven():
    assert objection(OURS, EXPECTED) == ""
    assert objection(replace(OURS, owner=""), EXPECTED) == ""  # started by an agent of before
    elsewhere = tuple(word.replace("/var/lib/trefoil", "/srv/state") for word in ARGV)
    assert objection(replace(OURS, argv=elsewhere), EXPECTED) == ""  # the setting state_dir was changed


@pytest.mark.parametrize(
    ("running", "why"),
    [
        (replace(OURS, tag=f"{NAME}.g0"), "its tag"),
        (replace(OURS, tag=NAME), "its tag"),
        (replace(OURS, tag=f"{NAME}.g7+4711"), "its tag"),
        (replace(OURS, tag=f"{NAME}.g{10**13}"), "its tag"),
        (replace(OURS, tag="node0-gpu1-1g.5gb-6.g7"), "its tag"),
        (replace(OURS, owner="prod/node1"), "started by prod/node1"),
        (replace(OURS, owner="test/node0"), "started by test/node0"),
        (replace(OURS, argv=()), "its command is not known"),
        (replace(OURS, argv=without("--id")), "--id=(none)"),
        (replace(OURS, argv=(*ARGV, "--id=another")), "--id=(none)"),
        (replace(OURS, argv=(*without("--grpc-port"), "--grpc-port=8200")), "--grpc-port=8200"),
        (replace(OURS, argv=without("--metrics-port")), "--metrics-port=(none)"),
        (replace(OURS, argv=(*without("--model-rep"), "--model-repository=/models")), "model repository /models"),
        (replace(OURS, argv=(*without("--model-rep"), f"--model-repository=/x/{NAME}")), "model repository"),
        (replace(OURS, argv=(*ARGV, "--grpc-use-ssl=true")), "it uses TLS"),
        (replace(OURS, gpu_uuid="MIG-2"), "it runs on MIG-2"),
        (replace(OURS, gpu_uuid=""), "it runs on no GPU"),
    ],
)
def test_whatever_differs_is_an_objection(running, why):
    assert why in objection(running, EXPECTED)


def test_a_node_with_tls_does_not_take_a_triton_that_speaks_clear_text():
    assert "clear text" in objection(OURS, replace(EXPECTED, tls=True))
    assert objection(replace(OURS, argv=(*ARGV, "--grpc-use-ssl=true")), replace(EXPECTED, tls=True)) == ""


def test_the_key_is_read_from_the_command():
    assert restricted_key(ARGV) == "secret"
    assert restricted_key(without("--grpc-restricted")) == ""
    assert restricted_key((*ARGV, ARGV[-1])) == ""
    assert restricted_key(("--grpc-restricted-protocol=logging",)) == ""


@pytest.mark.parametrize("tag", ["", "x", ".g", "x.g", "x.g-1", "x.g1.5", "x.g²", "x.g٣x"])
def test_what_is_no_tag_has_no_generation(tag):
    assert split_tag(tag) == ("", 0)


@pytest.mark.parametrize(
    ("device", "kind", "key"),
    [
        ("node0/gpu0", "Tesla T4", SliceKey("node0/gpu0", "whole", 0, 1)),
        ("node0/cpu", "cpu:4", SliceKey("node0/cpu", "cpu:2", 1, 2)),
        ("node0/cpu", "cpu:4", SliceKey("node0/cpu", "quota:0.5", 10, 5)),
    ],
)
def test_slices_that_nothing_is_created_for_are_found_by_their_names(device, kind, key):
    names = [key.name, "node0-gpu7-whole-0", "node0-cpu-cpu-99-0", "node0-cpu-cpu-2-3", "node0-cpu-x", "", "node0-cpu-"]
    assert list(uncut_keys(device, device_type(kind), names)) == [key]
