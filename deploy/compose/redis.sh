#!/bin/sh
# Redis of a Compose deployment. Every day it reads its certificate anew, so that a renewed one is used without a restart.
set -eu
(
    while sleep "${TREFOIL_RENEW_S:-86400}"; do
        REDISCLI_AUTH=$(cat /run/trefoil/password) redis-cli --tls --cacert /run/trefoil/ca.crt --cert /run/trefoil/tls.crt --key /run/trefoil/tls.key \
            config set tls-cert-file /run/trefoil/tls.crt tls-key-file /run/trefoil/tls.key | sed 's/^/certificate read anew: /'
    done
) &
exec redis-server /etc/trefoil/redis.conf
