#!/bin/bash
# A simulated node in one container: GPUs that are none and the real Tritons on them, and their power agent. Told to stop,
# it has its work moved to other nodes first, so that an update of the stack fails no request; what no plan has moved until
# TREFOIL_DRAIN_S drains where it is, for 30 s at most. At its next start it is in service again, but for what an operator
# drained.
set -eu
umask 027
# One at a time: after a node was cut off, the Swarm starts a new one before it ends the one that ran on.
exec 9>/var/lib/trefoil/container.lock
trap "exit 0" TERM
flock 9 &
wait $!
trap - TERM
node=$TREFOIL_POWER_AGENT_NODE drained=/var/lib/trefoil/drained-to-stop why="its container is replaced"
tar -C /tmp -xf /run/secrets/nodes.tar "./$node.tar" ||
    { echo "error: node = '$node': no secrets of it. Remedy: deploy/swarm/secrets.sh with its name, and TREFOIL_SECRETS" >&2; exit 2; }
tar -C /run/trefoil -xf "/tmp/$node.tar" --no-same-owner --no-overwrite-dir
# Others reach it by its address: the name server forgets a container as soon as that is told to stop.
address=$(hostname -i)
export TREFOIL_POWER_AGENT_ADVERTISE_HOST=${address%% *}

ask() { trefoil node "$@" --target localhost:8103; }

in_service() { ask show --json | python -c 'import json, sys; [print(d["device"]) for d in json.load(sys.stdin)["node"]["devices"] if not d["cordon"]]'; }

stop() {
    trap "" TERM
    in_service >$drained || echo "warning: the agent does not answer, so nothing is drained" >&2
    while read -r device; do ask drain "$device" --why "$why" --patience "$TREFOIL_DRAIN_S" >/dev/null; done <$drained
    while read -r device; do ask drain "$device" --why "$why" --patience "$TREFOIL_DRAIN_S" --wait $((TREFOIL_DRAIN_S + 30)) >/dev/null; done <$drained
    touch /tmp/stopping
    kill -TERM "$agent" "$simulated"
    wait
    exit 0
}

python -P -m trefoil.simulated_node --config /etc/trefoil/node.toml --node "$node" &
simulated=$!
# The hardware outlives its agent: one that ends is started again, and restarts no Triton.
(
    trap 'kill -TERM "$child"; wait "$child"; exit 0' TERM
    while [ ! -e /tmp/stopping ]; do
        python -P -m power_agent --config /etc/trefoil/power_agent.toml & child=$!
        wait "$child" || sleep 1
    done
) &
agent=$!
trap stop TERM
(
    [ -s $drained ] || exit 0
    until python -P -m trefoil.health localhost:8103 --ca "$TREFOIL_TLS_CA" --certificate "$TREFOIL_TLS_CERTIFICATE" --key "$TREFOIL_TLS_KEY" >/dev/null; do sleep 1; done
    while read -r device; do ask drain "$device" --release >/dev/null; done <$drained
    rm $drained
) &
wait "$simulated" || exit 1
