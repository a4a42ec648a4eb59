#!/bin/sh
# Secrets of a Swarm, from the authority that this manager keeps in the volume trefoil_authority (made at the first run):
#   deploy/swarm/secrets.sh 10.0.0.11 node-a node-b node-c     the address of Redis' host, and the simulated nodes by hostname
# They cannot be changed in place: with TREFOIL_SECRETS=2 (3, ...) a new set is made, of the same authority, token and
# passwords and with new certificates; `docker stack deploy` with the same variable then renews them everywhere.
# TREFOIL_ROTATE="token begin" replaces a secret too, in three sets: begin, switch, end (docs/howto/secrets.md).
set -eu
refuse() { echo "error: $1 = '$2': $3. Remedy: $4" >&2; exit 2; }

address=${1:-} set=${TREFOIL_SECRETS:-1}
[ -n "$address" ] || refuse ADDRESS "" "missing" "$0 ADDRESS-OF-THE-HOST-OF-REDIS [SIMULATED-NODE ...]"
shift
case $set in *[!0-9]* | "") refuse TREFOIL_SECRETS "$set" "no number" "1, or one more than the set in use" ;; esac
for node; do case $node in *[!A-Za-z0-9._-]*) refuse NODE "$node" "no hostname" "as 'docker node ls' prints it" ;; esac; done
[ "$(docker info --format '{{.Swarm.ControlAvailable}}')" = true ] || refuse DOCKER_HOST "${DOCKER_HOST:-}" "no manager of a Swarm" "run it on one, after 'docker swarm init'"
[ -z "$(docker secret ls -q --filter "name=trefoil_token_$set")" ] || refuse TREFOIL_SECRETS "$set" "that set is there" "TREFOIL_SECRETS=$((set + 1)), and the same for docker stack deploy"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# By the script of the Compose file: the same authority, names and files, the node's pairs once for each node.
docker run --rm --network none -v trefoil_authority:/run/trefoil-authority -v trefoil_secrets:/run/trefoil \
    -v trefoil_secrets_controller:/run/trefoil-controller -v trefoil_secrets_dispatcher:/run/trefoil-dispatcher \
    -v trefoil_secrets_redis:/run/trefoil-redis -v trefoil_secrets_redis_exporter:/run/trefoil-redis_exporter \
    -e "TREFOIL_ROTATE=${TREFOIL_ROTATE:-}" -e TREFOIL_NODE=unused -e "TREFOIL_ADVERTISE_HOST=$address" "trefoil:${TREFOIL_TAG:-latest}" sh -euc '
        /etc/trefoil/secrets.sh make >&2
        if [ -n "$TREFOIL_ROTATE" ]; then /etc/trefoil/secrets.sh rotate $TREFOIL_ROTATE >&2; fi
        mkdir /tmp/nodes
        for node; do rm -rf /tmp/export; /etc/trefoil/secrets.sh export "$node" agent redis >"/tmp/nodes/$node.tar"; done
        tar -C /tmp/nodes -cf /tmp/nodes.tar .
        tar -c /run/trefoil /run/trefoil-controller /run/trefoil-dispatcher /run/trefoil-redis /run/trefoil-redis_exporter /tmp/nodes.tar 2>/dev/null' - "$@" | tar -x -C "$folder" --no-same-owner

put() { docker secret create "trefoil_$1_$set" "$folder/$2" >/dev/null; }
for file in ca.crt tls.crt tls.key token redis_url; do put "$file" "run/trefoil/$file"; done
put plan.key run/trefoil-controller/plan.key
put routes.key run/trefoil-dispatcher/routes.key
for file in tls.crt tls.key password.conf password metrics.conf; do put "redis_$file" "run/trefoil-redis/$file"; done
for file in tls.crt tls.key passwords.json; do put "exporter_$file" "run/trefoil-redis_exporter/$file"; done
put nodes tmp/nodes.tar
echo "set $set of secrets: docker stack deploy -c deploy/swarm/trefoil.yml trefoil"
