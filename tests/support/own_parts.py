"""A user's own parts for the contract tests: `TREFOIL_CONTRACT_OWN="router=mine:Router,queue=mine:Queue"`.

Several of a kind may be given; without any, an example of each.
"""

import os

EXAMPLES = {
    "planner": "tests.support.seam.planner:Ceiling",
    "forecaster": "tests.support.seam.forecaster:Promised",
    "router": "tests.support.own_router:LongestIdle",
    "queue": "tests.support.own_queue:Urgent",
    "governor": "tests.support.seam.governor:Stairs",
}


def own(kind: str) -> list[str]:
    """The module:Class of each of that kind, the example first."""
    given = [each.partition("=") for each in os.environ.get("TREFOIL_CONTRACT_OWN", "").split(",") if each]
    return list(dict.fromkeys([EXAMPLES[kind], *(path for name, _, path in given if name.strip() == kind)]))
