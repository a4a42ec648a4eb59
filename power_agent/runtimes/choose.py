"""Which runtime a node's settings ask for."""

from power_agent.devices.node_client import NodeClient
from power_agent.runtimes.base import Runtime
from power_agent.runtimes.node import NodeRuntime
from power_agent.settings import PowerAgentSettings
from trefoil.core.errors import SettingError


def choose_runtime(settings: PowerAgentSettings, client: NodeClient | None) -> Runtime:
    """The runtime that `settings.runtime` names; `client` is that of the simulated node, if there is one.

    Raises:
        SettingError: it needs something that the settings do not give.
    """
    match settings.runtime_name:
        case "node":
            if client is None:
                remedy = "set node_socket to that of a simulated node, or runtime to process or docker"
                raise SettingError("no simulated node is named", field="runtime", value="node", remedy=remedy)
            return NodeRuntime(client)
        case name:
            raise SettingError("not available", field="runtime", value=name, remedy="node")
