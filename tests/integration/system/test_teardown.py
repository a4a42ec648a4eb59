"""What the tests before have left behind: the decisions of the controller, taken again. (Named to run last.)"""

import pytest

from tests.integration.system.conftest import Serving

pytestmark = pytest.mark.integration


@pytest.mark.gate
def test_every_decision_since_up_replays_to_the_identical_plan(running: Serving):
    system = running.system
    recorded = system.ask("state", "dump", "decisions", "--last", "1000")["decisions"]
    again = system.ask("replay")  # asked second: the controller may decide in between
    print(f"{len(again)} decisions: " + ", ".join(f"{r['id']} {r['trigger']}" for r in again))
    assert {record["id"] for record in recorded} <= {result["id"] for result in again}
    assert [result["id"] for result in again if not result["equal"]] == []
    assert any(result["trigger"] == "start" and result["recorded"] for result in again)
    (one,) = system.ask("replay", again[0]["id"])
    assert one == again[0]
