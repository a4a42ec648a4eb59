"""A node plan passes only as what the controller signed, for the cluster and the node that it was signed for."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.agent_cluster import node_plan, planned
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError, SettingError
from trefoil.core.fleet import DeviceState
from trefoil.core.plan import NodePlan, Plan, Route
from trefoil.runtime import codec
from trefoil.runtime.security.plan_keys import PlanKeys, main, routes_key

OLD, NEW, OTHER = "0" * 32, "1" * 32, "2" * 32
PLAN = node_plan(7, planned("3g.20gb", 4, 1), epoch=3)


def test_what_is_signed_passes_through_redis_and_without_keys_nothing_is_asked() -> None:
    keys = PlanKeys("c", [NEW])
    signed = keys.sign(PLAN)
    assert keys.verify(codec.decode(NodePlan, codec.encode(signed))) == PLAN
    assert not PlanKeys("c")
    assert PlanKeys("c").sign(PLAN) == PLAN
    assert PlanKeys("c").verify(signed) == PLAN


def test_while_keys_are_changed_both_pass_and_the_first_signs() -> None:
    both = PlanKeys("c", [NEW, OLD])
    for signer in (PlanKeys("c", [OLD]), PlanKeys("c", [NEW]), both):
        assert both.verify(signer.sign(PLAN)) == PLAN
    assert PlanKeys("c", [NEW]).verify(both.sign(PLAN)) == PLAN
    with pytest.raises(PlanError, match=r"^plan of node0 in Redis = '\w{8}': signed with a key that is not \w{8}, "):
        PlanKeys("c", [OLD]).verify(both.sign(PLAN))


@given(st.data())
def test_a_plan_that_was_changed_moved_or_signed_by_others_names_what_is_wrong(data: st.DataObject) -> None:
    keys = PlanKeys("c", [NEW])
    signed = keys.sign(PLAN)
    device = signed.devices[0]
    forged, why = data.draw(
        st.sampled_from(
            [
                (PLAN, "not signed"),
                (replace(signed, node="node1"), "is not what the controller signed"),
                (replace(signed, revision=Revision(3, 8)), "is not what the controller signed"),
                (replace(signed, revision=Revision(4, 7)), "is not what the controller signed"),
                (replace(signed, devices=(replace(device, target=DeviceState.ASLEEP),)), "is not what"),
                (replace(signed, signature=signed.signature[:-1] + "x"), "is not what the controller signed"),
                (PlanKeys("d", [NEW]).sign(PLAN), "is not what the controller signed"),
                (PlanKeys("c", [OTHER]).sign(PLAN), "signed with a key that is not"),
                (replace(signed, signature=data.draw(st.text())), ""),
            ]
        )
    )
    with pytest.raises(PlanError, match=rf"^plan of node. in Redis.*: {why}.*\. Remedy: .*the plan that runs stays"):
        keys.verify(forged)


def test_a_routes_key_signs_plans_and_nothing_that_agents_or_controllers_obey(tmp_path: Path) -> None:
    controller, dispatcher = PlanKeys("c", [NEW]), PlanKeys("c", [routes_key(NEW)])
    plan = Plan(Revision(3, 7, 1), "exact", created_at_s=1_750_000_000.1234567, routes=(Route("f"),))
    assert (
        dispatcher.verify_routes(codec.decode(Plan, codec.encode(controller.sign_routes(plan)))).routes == plan.routes
    )
    assert not dispatcher.sign(PLAN).signature
    for forged in (
        replace(plan, signature=controller.sign(PLAN).signature),
        replace(controller.sign_routes(plan), why="x"),
    ):
        with pytest.raises(PlanError, match=r"plan in Redis = .*the last plan that was obeyed stays in force"):
            dispatcher.verify_routes(forged)
    file = tmp_path / "routes.key"
    file.write_text(routes_key(NEW))
    file.chmod(0o600)
    assert PlanKeys.read("c", file, routes=True)
    with pytest.raises(SettingError, match="holds a routes key, which dispatchers use"):
        PlanKeys.read("c", file)


def test_the_command_prints_the_routes_key_of_each_plan_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.key"
    file.write_text(f"{NEW}\n{OLD}\n")
    file.chmod(0o600)
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.split() == [routes_key(NEW), routes_key(OLD)]
    assert NEW not in routes_key(NEW)
    for refused in ([], [str(tmp_path / "none")]):
        assert main(refused) == 2
        assert "Remedy: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("short\n", 0o600, "holds a key of less than 32 characters. Remedy: make one: openssl rand -hex 32 > "),
        (f"{NEW}\n{OLD}\n{OTHER}\n", 0o600, "holds no secret: at most 2 lines of text, none of them empty"),
        (f"{NEW}\n\n", 0o600, ""),
        (NEW, 0o604, "others may read or change it (mode 0604)"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_and_not_shown(tmp_path: Path, text: str, mode: int, why: str) -> None:
    path = tmp_path / "plan.key"
    path.write_text(text)
    path.chmod(mode)
    if not why:
        assert PlanKeys.read("c", path).verify(PlanKeys("c", [NEW]).sign(PLAN)) == PLAN
        return
    with pytest.raises(SettingError) as caught:
        PlanKeys.read("c", path)
    assert str(caught.value).startswith(f"plan_key_file = '{path}': {why}")
    assert text.split()[0] not in str(caught.value).replace("secret", "")


def test_a_changed_file_of_keys_is_in_force_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "plan.key"
    path.touch(0o600)
    path.write_text(OLD)
    keys, old, new = PlanKeys.read("c", path), PlanKeys("c", [OLD]), PlanKeys("c", [NEW])
    for text, signer in ((f"{OLD}\n{NEW}", old), (f"{NEW}\n{OLD}", new), ("short", new)):
        path.write_text(text)
        assert (keys.signing, keys.sign(PLAN)) == (signer.signing, signer.sign(PLAN))
        assert keys.verify(old.sign(PLAN)) == keys.verify(new.sign(PLAN)) == PLAN
    assert keys.file is not None
    assert "holds a key of less than 32 characters" in keys.file.trouble
    path.write_text(NEW)
    with pytest.raises(PlanError, match="signed with a key that is not"):
        keys.verify(old.sign(PLAN))
