#!/bin/sh
# Redis of a Compose deployment. A renewed certificate and a changed password are in use within seconds, without a restart.
set -eu
seen() { cat /run/trefoil/password /run/trefoil/tls.crt | cksum; }
(
    password=$(head -n 1 /run/trefoil/password) before=$(seen)
    while sleep "${TREFOIL_LOOK_S:-5}"; do
        now=$(seen)
        [ "$now" != "$before" ] || continue
        # By the password that holds: all lines of the file count from now on, and connections stay.
        if said=$(echo "CONFIG SET tls-cert-file /run/trefoil/tls.crt tls-key-file /run/trefoil/tls.key
ACL SETUSER default on resetpass $(sed 's/^/>/' /run/trefoil/password | tr '\n' ' ')" |
            REDISCLI_AUTH=$password redis-cli -e --tls --cacert /run/trefoil/ca.crt --cert /run/trefoil/tls.crt --key /run/trefoil/tls.key); then
            password=$(head -n 1 /run/trefoil/password) before=$now
        fi
        echo "certificate and password read again:" $said
    done
) &
exec redis-server /etc/trefoil/redis.conf
