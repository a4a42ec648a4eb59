#!/bin/sh
# An agent in a pod. `run`: its own pair and the common secrets in one folder, as links, so that renewed ones are seen; it
# takes back what the last `drain` of this node took out of service. `drain`, before the pod ends: its work moves to other
# nodes, so that a rollout fails no request; what no plan has moved within DRAIN_S drains where it is.
set -eu
umask 027
drained=${TREFOIL_POWER_AGENT_STATE_DIR:-/var/lib/trefoil}/drained-to-stop why="its pod is replaced"

ask() { trefoil node "$@" --target localhost:8103; }

in_service() { ask show --json | python -c 'import json, sys; [print(d["device"]) for d in json.load(sys.stdin)["node"]["devices"] if not d["cordon"]]'; }

warn() { echo "warning: $1: the agent refused" >&2; }

case $1 in
run)
    config=$2
    [ -d "/run/trefoil-nodes/$NODE" ] ||
        { echo "error: gpu.nodes: no certificate names node '$NODE'. Remedy: add it there, and upgrade the release" >&2; exit 2; }
    ln -sf /run/trefoil-common/* "/run/trefoil-nodes/$NODE"/* /run/trefoil/
    (
        [ -s $drained ] || exit 0
        until ask show >/dev/null 2>&1; do sleep 1; done
        while read -r device; do ask drain "$device" --release >/dev/null || warn "$device"; done <$drained
        rm $drained
    ) &
    exec python -P -m power_agent --config "$config" ;;
drain)
    in_service >$drained || echo "warning: the agent does not answer, so nothing is drained" >&2
    while read -r device; do ask drain "$device" --why "$why" --patience "$DRAIN_S" >/dev/null || warn "$device"; done <$drained
    while read -r device; do ask drain "$device" --why "$why" --patience "$DRAIN_S" --wait $((DRAIN_S + 30)) >/dev/null || warn "$device"; done <$drained
    [ ! -d /run/trefoil-node ] || touch /run/trefoil-node/drained ;;
esac
