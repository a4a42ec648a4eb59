#!/bin/sh
# Start a Compose deployment with a tag of Trefoil's images, or roll one that runs to it; requests are answered all the time:
#   deploy/compose/upgrade.sh 1.3        back: the same with the old tag
# One service after the other, the next once that one is healthy: a dispatcher, behind HAProxy, is drained before it ends.
# The node is emptied before it is replaced, and requests wait for it (no_slice_wait_s); GPUs' Tritons are not touched.
# It writes TREFOIL_TAG into .env, and the file by which `docker compose up -d` knows the tag: with another it is refused.
set -eu
cd "$(dirname "$0")/../.."
compose=${COMPOSE:-docker compose} env=${TREFOIL_ENV_FILE:-.env} healthy_s=${TREFOIL_HEALTHY_S:-180}

refuse() { echo "error: $1 = '$2': $3. Remedy: $4" >&2; exit 2; }

tag=${1:-}
case $tag in "" | *[!A-Za-z0-9._-]*) refuse TAG "$tag" "no tag of an image" "e.g. $0 1.3" ;; esac
case $(printf %s "$tag" | tr A-Z a-z) in latest | stable | main | master | trunk | head | edge | nightly | dev | current | next)
    refuse TAG "$tag" "a tag that moves: with the next build it names another image, and there is no way back" "name this build: docker tag trefoil:$tag trefoil:1.3, trefoil-triton-cpu too, then $0 1.3" ;;
esac
touch "$env"
dc() { TREFOIL_TAG=$tag $compose --env-file "$env" "$@"; }

mark=deploy/compose/tags/$tag.comes-by-upgrade.sh
had=$([ -e "$mark" ] && echo yes || echo)
stop() { [ -n "$had" ] || rm -f "$mark"; refuse "$@"; }  # so that `up -d` is refused still

healthy() {
    id=$(dc ps -q "$1") waited=0
    until [ "$(docker inspect -f '{{.State.Health.Status}}' "$id" 2>/dev/null)" = healthy ]; do
        waited=$((waited + 1))
        [ $waited -lt "$healthy_s" ] || stop "$1" "$tag" "not healthy after $healthy_s s; what comes after it runs as before" "docker logs $id; back: $0 OLD-TAG"
        sleep 1
    done
}

replace() {
    echo "$*: to $tag"
    dc up -d --no-deps "$@" >/dev/null
    for each; do healthy "$each"; done
}

node() { dc exec -T agent trefoil node drain --target localhost:8103 "$@" >/dev/null; }

for image in trefoil trefoil-triton-cpu; do
    docker image inspect "$image:$tag" >/dev/null 2>&1 || docker pull -q "$image:$tag" >/dev/null 2>&1 ||
        refuse TAG "$tag" "no image $image:$tag here, and none can be pulled" "TREFOIL_TAG=$tag deploy/images/build.sh"
done
touch "$mark"
running=$(dc ps --services --status running)
runs() { printf '%s\n' "$running" | grep -qx "$1"; }
if [ -z "$running" ]; then
    dc up -d || stop TAG "$tag" "docker compose up -d failed" "what it says above"
else
    dc run --rm -T --no-deps secrets make || stop secrets "$tag" "did not end well" "what it says above"
    for service in dispatcher_1 dispatcher_2 controller carbon_feed renewal engine_proxy agent_gpu; do
        if runs $service; then replace $service; fi
    done
    if runs node; then
        replace agent
        node --patience 5 --wait 120 || stop node "$tag" "was not emptied; it runs as before, the others are upgraded" "trefoil node show; the same command again"
        replace node
        node --release
    fi
fi
grep -v '^TREFOIL_TAG=' "$env" > "$env.new" || true
echo "TREFOIL_TAG=$tag" >> "$env.new"
chmod 0600 "$env.new" && mv "$env.new" "$env"
find deploy/compose/tags -name '*.comes-by-upgrade.sh' ! -name "$tag.*" -delete  # latest too, which is for a first `up` alone
echo "all of it runs $tag"
