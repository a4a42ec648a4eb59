#!/bin/sh
# Back up a Compose deployment while it runs, or restore it where there is none:
#   deploy/compose/backup.sh write trefoil.tar      authority, secrets, Redis, what controller and feed keep; then checked
#   deploy/compose/backup.sh check trefoil.tar
#   deploy/compose/backup.sh restore trefoil.tar    then: docker compose up -d
# Whoever reads the file commands the deployment: it is written 0600. Not in it: what Prometheus and Grafana keep.
set -eu
umask 077
folder=$(cd "$(dirname "$0")/../.." && pwd)
refuse() { echo "error: $1 = '$2': $3. Remedy: $4" >&2; exit 2; }

word=${1:-} file=${2:-}
[ -n "$file" ] || refuse FILE "" "missing" "$0 write|check|restore FILE"
dc() { ${COMPOSE:-docker compose} --project-directory "$folder" -f "$folder/docker-compose.yml" "$@"; }
secrets() { dc run --rm -T --no-deps secrets "$1"; }

check() {  # as a restore would read it
    secrets check <"$1" && dc run --rm -T --no-deps --entrypoint sh redis -c \
        'tar -x -C /tmp var/lib/trefoil-redis && redis-check-aof /tmp/var/lib/trefoil-redis/appendonlydir/*.manifest >&2' <"$1"
}

case $word in
write)
    [ ! -e "$file" ] || refuse FILE "$file" "is there already" "another name"
    trap 'rm -f "$file.part"' EXIT
    for left in 2 1 0; do  # Redis goes on writing: what was torn by that is read once more
        if secrets backup >"$file.part" && check "$file.part"; then break; fi
        [ $left -gt 0 ] || refuse FILE "$file" "three backups were not whole; nothing is written" "what it says above; room on the disk"
    done
    sync "$file.part" && mv "$file.part" "$file"
    echo "$file: $(wc -c <"$file") bytes, read again and whole" ;;
check) check "$file" && echo "$file is whole" ;;
restore)
    check "$file" || refuse FILE "$file" "is not whole, and nothing was restored" "another backup"
    secrets restore <"$file"
    echo "restored: docker compose up -d" ;;
*) refuse WORD "$word" "no such word" "write, check or restore" ;;
esac
