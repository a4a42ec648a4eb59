#!/bin/sh
# Build every image that docker-compose.yml names and that this engine has not and cannot pull: those of Trefoil from the
# checkout, those of others from Debian's packages under the same tags. Options go to `docker build`, e.g. --network host.
# The base, too, is made here (debootstrap, as root) only where it cannot be pulled. FRESH=1 builds Trefoil's anew.
set -eu
cd "$(dirname "$0")/../.."
export DOCKER_BUILDKIT=0
BASE=${BASE:-debian:bookworm-slim}

here() { docker image inspect "$1" >/dev/null 2>&1; }

have() {
    if here "$1"; then echo "$1: is here"
    elif [ -z "${OFFLINE:-}" ] && docker pull -q "$1" >/dev/null 2>&1; then echo "$1: pulled"
    else return 1; fi
}

build() {  # TAG WHAT OPTIONS...
    tag=$1 began=$(date +%s)
    echo "$tag: being built from $2, some minutes"
    shift 2
    docker build -q -t "$tag" "$@" >/dev/null
    echo "$tag: built in $(($(date +%s) - began)) s, $(($(docker image inspect -f '{{.Size}}' "$tag") / 1000000)) MB"
}

base() {
    case $BASE in debian:bookworm | debian:bookworm-slim) ;;
    *) echo "error: BASE = $BASE: cannot be pulled, and only debian:bookworm-slim is made here. Remedy: load it into this engine" >&2; exit 1 ;; esac
    command -v debootstrap >/dev/null || { echo "error: BASE = $BASE: cannot be pulled, and there is no debootstrap. Remedy: install debootstrap, or name a base that this engine has" >&2; exit 1; }
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    debootstrap --variant=minbase bookworm "$folder" ${MIRROR:+"$MIRROR"} >&2
    rm -rf "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
    # Where a proxy of this host signs what is fetched, the build has to trust what this host trusts.
    [ ! -f /etc/ssl/certs/ca-certificates.crt ] || install -D -m 0644 /etc/ssl/certs/ca-certificates.crt "$folder/usr/local/share/ca-certificates/build-host.crt"
    tar -C "$folder" -c . | docker import --change 'CMD ["bash"]' - "$BASE" >/dev/null
    rm -rf "$folder"
}

have "$BASE" || { echo "$BASE: made by debootstrap, a minute or two" && base; }
for target in trefoil triton-cpu; do
    image=trefoil:${TREFOIL_TAG:-latest}
    [ $target = trefoil ] || image=trefoil-triton-cpu:${TREFOIL_TAG:-latest}
    if here "$image" && [ -z "${FRESH:-}" ]; then echo "$image: is here (FRESH=1 builds it anew)"; continue; fi
    # `docker compose up -d` would replace at once all that runs an older image of this tag.
    if [ -n "$(docker ps -q --filter "ancestor=$image")" ]; then
        echo "error: TREFOIL_TAG = '${TREFOIL_TAG:-latest}': containers run $image. Remedy: TREFOIL_TAG=NEXT $0, then deploy/compose/upgrade.sh NEXT" >&2
        exit 2
    fi
    build "$image" "this checkout" "$@" --build-arg "BASE=$BASE" --build-arg "VERSION=$(sed -n 's/^__version__.*"\(.*\)"$/\1/p' trefoil/__init__.py)" \
        --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || true)" ${PIP_INDEX_URL:+--build-arg "PIP_INDEX_URL=$PIP_INDEX_URL"} -f deploy/Dockerfile --target $target .
done
while read -r tag target package; do
    have "$tag" || build "$tag" "Debian's $package" "$@" --build-arg "BASE=$BASE" --build-arg "PACKAGE=$package" -f deploy/images/Dockerfile --target "$target" deploy/images </dev/null
done <<'TAGS'
redis:7.0 redis redis-server
haproxy:2.6 haproxy haproxy
prom/prometheus:v2.42.0 prometheus prometheus wget
oliver006/redis_exporter:v1.45.0-alpine redis_exporter prometheus-redis-exporter wget
prom/alertmanager:v0.25.0 alertmanager prometheus-alertmanager wget
TAGS
have grafana/grafana:11.6.0 || echo "no grafana/grafana:11.6.0: no registry serves it here and Debian has no package, so the profile dashboards cannot start"
