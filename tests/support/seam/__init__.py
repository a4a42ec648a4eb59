"""Your own policy: planner, forecaster, router, queue and governor, each a file, and the row that names them."""

from trefoil.core.policies import Policy

ROW = Policy(
    "seam",
    planner="tests.support.seam.planner:Ceiling",
    forecaster="tests.support.seam.forecaster:Promised",
    triggers=("start", "objective", "loss"),
    router="tests.support.seam.router:Holding",
    queue="tests.support.seam.queue:Newest",
    governor="tests.support.seam.governor:Stairs",
    settings={
        "forecaster": {"rate_per_s": 21.0},
        "governor": {"step_mhz": 300},
        "planner": {"variant": "digits-m", "ceiling_mhz": 1200},
    },
)
