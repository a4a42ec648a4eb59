#!/bin/sh
# Secrets and certificates of a Compose deployment; what the one-shot service `secrets` runs at each `up`, and `renewal`
# every day. What is there stays; a certificate is made anew where its names changed or its last 30 days began.
#   docker compose run --rm -T secrets export gpu8 10.0.0.12 10.0.0.11 > gpu8.tar    what the host of node gpu8 needs
#   docker compose run --rm -T secrets import < gpu8.tar                             on that host, before its first `up`
#   docker compose run --rm -T secrets rotate token begin      a second token (redis_password, plan.key); switch: it is used; end: the first is dropped
# `backup`, `check` and `restore` are what deploy/compose/backup.sh asks for.
# A folder, and so a volume, for each who reads: no service sees the authority's key. Feed, controller and dispatchers
# share a pair; the plan key is only the controller's and the agents', and of it dispatchers have the routes key.
set -eu
umask 027
authority=/run/trefoil-authority control=/run/trefoil controller=/run/trefoil-controller dispatcher=/run/trefoil-dispatcher redis=/run/trefoil-redis haproxy=/run/trefoil-haproxy
node=/run/trefoil-agent grafana=/run/trefoil-grafana exporter=/run/trefoil-redis_exporter
DAYS=365 RENEW_S=2592000
kept="run/trefoil run/trefoil-authority run/trefoil-controller run/trefoil-dispatcher run/trefoil-agent run/trefoil-redis
    run/trefoil-haproxy run/trefoil-grafana run/trefoil-redis_exporter var/lib/trefoil-redis var/lib/trefoil-controller var/lib/trefoil-carbon_feed"

refuse() { echo "error: $1 = '$2': $3. Remedy: $4" >&2; exit 2; }

random() { openssl rand -hex 32; }

put() { cat > "$1.new"; if cmp -s "$1.new" "$1"; then rm "$1.new"; else mv "$1.new" "$1"; fi; }  # FILE: from stdin

keep() { if [ -s "$1" ]; then cat >/dev/null; else cat > "$1.new" && mv "$1.new" "$1"; fi; }  # FILE: from stdin, unless it is there

pair() {  # FOLDER NAME USAGE ALTERNATIVE-NAMES [STEM]: FOLDER/tls.crt and tls.key, FOLDER/ca.crt
    stem=$1/${5:-tls}
    cmp -s "$authority/ca.crt" "$1/ca.crt" || cp "$authority/ca.crt" "$1/ca.crt"
    if openssl verify -CAfile "$authority/ca.crt" "$stem.crt" >/dev/null 2>&1 && openssl x509 -in "$stem.crt" -noout -checkend $RENEW_S >/dev/null &&
        [ "$(cat "$stem.names" 2>/dev/null)" = "$4" ]; then return; fi
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$2" -addext "subjectAltName=$4" \
        -addext "extendedKeyUsage=$3" -keyout "$stem.key.new" -out "$stem.csr" 2>/dev/null
    openssl x509 -req -in "$stem.csr" -CA "$authority/ca.crt" -CAkey "$authority/ca.key" -days $DAYS -copy_extensions copy -out "$stem.crt.new" 2>/dev/null
    chmod 0640 "$stem.key.new"
    mv "$stem.key.new" "$stem.key" && mv "$stem.crt.new" "$stem.crt" && rm -f "$stem.csr" && printf %s "$4" > "$stem.names"
}

name() { case $1 in *[!0-9.]*) echo "DNS:$1" ;; *) echo "IP:$1" ;; esac; }  # of a host, as a certificate says it

redis_url() { echo "rediss://:$(head -n 1 "$authority/redis_password")@$1/0?ssl_ca_certs=/run/trefoil/ca.crt&ssl_certfile=/run/trefoil/tls.crt&ssl_keyfile=/run/trefoil/tls.key"; }

node_pairs() {  # FOLDER NODE ALTERNATIVE-NAMES
    pair "$1" "$2" serverAuth,clientAuth "DNS:$2,DNS:localhost,IP:127.0.0.1,$3"
    pair "$1" "tritons.$2" serverAuth "DNS:tritons.$2" tritons
    for file in "$control/token" "$controller/plan.key"; do cp "$file" "$1/copied" && mv "$1/copied" "$1/${file##*/}"; done
}

make() {
    [ "${TREFOIL_REDIS_PASSWORD-unset}" ] || refuse TREFOIL_REDIS_PASSWORD "" "empty" "drop that line of .env, and one is drawn"
    if [ ! -s "$authority/ca.crt" ]; then
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=${TREFOIL_CLUSTER:-trefoil}" \
            -addext keyUsage=critical,keyCertSign,cRLSign -keyout "$authority/ca.key" -out "$authority/ca.crt.new" 2>/dev/null
        mv "$authority/ca.crt.new" "$authority/ca.crt"
        echo "made an authority and secrets of this deployment; they last until 'down -v'"
    fi
    { [ "${TREFOIL_REDIS_PASSWORD-unset}" = unset ] && random || printf '%s\n' "$TREFOIL_REDIS_PASSWORD"; } | keep "$authority/redis_password"
    random | keep "$control/token"
    random | keep "$controller/plan.key"
    python -P -m trefoil.runtime.security.plan_keys "$controller/plan.key" > "$dispatcher/copied" && mv "$dispatcher/copied" "$dispatcher/routes.key"
    random | keep "$grafana/password"
    shared=$(name "${TREFOIL_ADVERTISE_HOST:-localhost}")
    pair "$control" control serverAuth,clientAuth "DNS:carbon_feed,DNS:controller,DNS:dispatcher,DNS:dispatcher_1,DNS:dispatcher_2,DNS:localhost,IP:127.0.0.1,$shared"
    pair "$redis" redis serverAuth,clientAuth "DNS:redis,DNS:localhost,IP:127.0.0.1,$shared"
    node_pairs "$node" "$TREFOIL_NODE" "DNS:node,DNS:agent,$shared"
    redis_url redis:6379 | put "$control/redis_url"
    redis_url redis:6379 | put "$node/redis_url"
    put "$redis/password.conf" <<PASSWORD
user default on $(sed 's/^/>/' "$authority/redis_password" | tr '\n' ' ')~* &* +@all
PASSWORD
    put "$redis/password" < "$authority/redis_password"
    cp "$authority/ca.crt" "$haproxy/ca.crt"
    pair "$exporter" redis_exporter clientAuth DNS:redis_exporter
    random | keep "$authority/metrics_password"
    keep "$redis/metrics.conf" <<METRICS
user metrics on >$(cat "$authority/metrics_password") resetkeys resetchannels -@all +info +latency|latest +slowlog|len
METRICS
    echo "{\"rediss://redis:6379\": \"$(cat "$authority/metrics_password")\"}" | keep "$exporter/passwords.json"
}

rotate() {  # SECRET STEP: each step once all services have read the one before, after ten seconds
    case $1 in token) file=$control/token ;; redis_password) file=$authority/redis_password ;; plan.key) file=$controller/plan.key ;;
    *) refuse "secrets rotate" "$1" "no such secret" "token, redis_password or plan.key" ;; esac
    [ -s "$file" ] && [ -s "$authority/ca.key" ] || refuse "secrets rotate" "$1" "no secrets of a first host here" "'docker compose up' makes them"
    lines=$(wc -l < "$file")
    case $2:$lines in
    begin:1) { cat "$file"; random; } | put "$file" ;;
    switch:2) sed -n '1h;2{p;x;p}' "$file" | put "$file" ;;
    end:2) sed -n 1p "$file" | put "$file" ;;
    *) refuse "secrets rotate $1" "$2" "the file has $lines lines" "begin where it has one, then switch, then end" ;; esac
    make
    echo "$1: $2 is done"
}

look() {
    if [ -s "$node/joined" ]; then
        [ "$(cat "$node/joined")" = "$TREFOIL_NODE" ] || refuse TREFOIL_NODE "$TREFOIL_NODE" "the secrets here are of $(cat "$node/joined")" "import those of $TREFOIL_NODE"
    elif [ -n "${TREFOIL_REDIS_URL:-}" ]; then
        refuse TREFOIL_REDIS_URL "$TREFOIL_REDIS_URL" "another host's Redis, and no secrets of it here" "docker compose run --rm -T secrets import < $TREFOIL_NODE.tar, made there by 'secrets export'"
    else make; fi
}

check() {  # FOLDER: what was unpacked there is whole
    for file in run/trefoil-authority/ca.crt run/trefoil-authority/redis_password run/trefoil/token run/trefoil-controller/plan.key; do
        [ -s "$1/$file" ] || refuse backup "$file" "missing or empty" "make another backup"
    done
    public=$(openssl x509 -in "$1/run/trefoil-authority/ca.crt" -noout -pubkey) || refuse backup run/trefoil-authority/ca.crt "no certificate" "make another backup"
    [ "$public" = "$(openssl pkey -in "$1/run/trefoil-authority/ca.key" -pubout)" ] ||
        refuse backup run/trefoil-authority/ca.key "not the key of ca.crt" "make another backup"
    openssl verify -CAfile "$1/run/trefoil-authority/ca.crt" "$1/run/trefoil/tls.crt" "$1/run/trefoil-redis/tls.crt" >/dev/null ||
        refuse backup run/trefoil/tls.crt "no certificate of this authority" "make another backup"
}

unpack() {  # FOLDER: of standard input; a part that is cut off is refused
    tar -C "$1" -x -p --no-same-owner --no-overwrite-dir || refuse backup stdin "no whole archive" "make another backup"
}

case ${1:-make} in
make) look ;;
renew)
    trap 'exit 0' TERM
    while :; do
        look
        sleep "${TREFOIL_RENEW_S:-86400}" &
        wait $!
    done ;;
backup)  # Redis rewrites a file now and then while it is read: one more is no harm, one that changed is looked at by Redis' own check
    tar -C / --warning=no-file-changed -c $kept || [ $? -eq 1 ] ;;
check) mkdir /tmp/backup && unpack /tmp/backup && check /tmp/backup ;;
restore)
    [ ! -s "$authority/ca.crt" ] || refuse "secrets restore" "$authority" "there is a deployment already" "'docker compose down -v' deletes it"
    unpack / && check / ;;
rotate)
    [ $# -eq 3 ] || refuse "secrets rotate" "$*" "not SECRET STEP" "e.g. secrets rotate token begin"
    rotate "$2" "$3" ;;
export)
    [ $# -eq 4 ] || refuse "secrets export" "$*" "not NODE, its address, this host's address" "e.g. secrets export gpu8 10.0.0.12 10.0.0.11"
    [ -s "$authority/ca.key" ] || refuse "secrets export" "$2" "no authority here" "'docker compose up' on the first host makes it"
    folder=/tmp/export && mkdir -p $folder
    node_pairs $folder "$2" "DNS:node,DNS:agent,$(name "$3")"
    redis_url "$4:${TREFOIL_REDIS_PORT:-6379}" > $folder/redis_url
    printf %s "$2" > $folder/joined
    tar -C $folder -c . ;;
import)
    tar -C "$node" -x --no-same-owner
    [ -s "$node/joined" ] || refuse "secrets import" stdin "no secrets of a node" "give what 'secrets export' printed"
    echo "secrets of $(cat "$node/joined") are here: docker compose --profile node up -d" ;;
*) refuse "secrets" "$1" "no such word" "make, renew, rotate, export, import, backup, check or restore" ;;
esac
