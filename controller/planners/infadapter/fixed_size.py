"""FIXED_SIZE: one variant on a fixed number of cores, whatever the load.

Source: the initial states of InfAdapter's experiments, kept; what a static provisioning costs and misses.
Data: none but the CPUs. Decision: `initial_cores` (0: the budget) of the variant `version` (0: the most accurate).
Deviations: none.
"""

from controller.planners.infadapter.vpa_plus import VpaPlusPlanner, VpaSettings


def fixed_size(settings: VpaSettings) -> VpaPlusPlanner:
    """VPA_PLUS that recommends nothing else than it began with."""
    return VpaPlusPlanner(settings, "fixed_size")
