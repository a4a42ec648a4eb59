"""Floors and explanations on a whole system: accuracies come from family.toml, by way of the plan."""

from collections import Counter

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.integration.system.conftest import Serving
from tests.support.dispatching import image

pytestmark = pytest.mark.integration


@pytest.mark.gate
def test_a_floor_is_kept_and_explained(serving: Serving):
    system = serving.system
    usual = system.ask("explain-request")
    accuracies = {row["target"]["variant"]: row["target"]["accuracy"] for row in usual["targets"]}
    assert len(accuracies) >= 2, "the first plan mixes variants"
    assert all(0.8 < accuracy < 1.0 for accuracy in accuracies.values())
    assert "at once" in usual["why"]
    best = max(accuracies, key=lambda name: accuracies[name])
    floored = system.ask("explain-request", f"trefoil_min_accuracy={accuracies[best]}")
    assert {row["target"]["variant"] for row in floored["targets"] if row["eligible"]} == {best}
    served: Counter[str] = Counter()
    with triton.InferenceServerClient(system.inference) as client:

        def ask(**parameters: str) -> str:
            answer = client.infer("digits", [image(3)], parameters=parameters or None)
            return str(answer.get_response().parameters["trefoil_variant"].string_param)

        for _ in range(10):
            served[ask(trefoil_min_accuracy=str(accuracies[best]))] += 1
        assert served == {best: 10}
        for _ in range(40):  # the others make up for it
            served[ask()] += 1
        with pytest.raises(InferenceServerException, match=rf"the best that is live is {accuracies[best]:g}"):
            ask(trefoil_min_accuracy="0.9999")
    share = sum(row["target"]["weight"] for row in usual["targets"] if row["target"]["variant"] == best)
    assert served[best] == pytest.approx(50 * share, abs=2.0)
