"""A budget on a whole system: counted by the controller from meters and receipts, obeyed by the dispatcher."""

from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.integration.system.conftest import Serving
from tests.support.dispatching import image
from tests.support.runtime_contract import until

pytestmark = pytest.mark.integration


@pytest.mark.gate
def test_a_budget_that_is_spent_refuses_requests_until_it_is_cleared(serving: Serving):
    system = serving.system
    with triton.InferenceServerClient(system.inference) as client:

        def refusal() -> str:
            try:
                client.infer("digits", [image(3)])
            except InferenceServerException as error:
                return str(error)
            return ""

        def row() -> dict[str, Any]:
            (found,) = system.ask("status")["budgets"]
            return found

        assert refusal() == ""
        system.ask("budget", "set", "--family", "digits", "--joules-per-day", "1")
        assert "all tenants on digits, 1 J a day, is spent. Remedy: try again at" in until(refusal)
        spent = row()
        assert (spent["rung"], spent["used"]) == ("refused", pytest.approx(spent["joules"]))
        raised = system.ask("budget", "set", "--family", "digits", "--joules-per-day", "1e12")["budget"]
        assert (raised["rung"], raised["number"]) == ("within", 2)
        until(lambda: not refusal())
        system.ask("budget", "clear", "--family", "digits")
