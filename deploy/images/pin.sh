#!/bin/sh
# Print the newest versions of all Debian packages that the images install beyond a minimal base, as packages.txt has them:
#   docker run --rm -v "$PWD/deploy/images:/images:ro" debian:bookworm-slim sh -c 'apt-get update -qq && /images/pin.sh' > packages.new
#   mv packages.new deploy/images/packages.txt
# On any machine of that release: deploy/images/pin.sh > packages.new
set -eu
. /etc/os-release
empty=$(mktemp) base=$(mktemp)
trap 'rm -f "$empty" "$base"' EXIT

closure() {  # PACKAGES: they and what they depend on, on a system without any package
    apt-get install -s --no-install-recommends -o Dir::State::status="$empty" "$@" | sed -n 's/^Inst \([^ ]*\) (\([^ ]*\) .*/\1=\2/p' | sort
}

closure $(apt-cache dumpavail | sed -n '/^Package: /{s///;h}; /^Priority: required$/{g;p}') > "$base"
libpython=$(apt-cache depends python3 | sed -n 's/^ *Depends: python\(3\.[0-9]*\)$/libpython\1/p')
[ -s "$base" ] && [ -n "$libpython" ] || { echo "error: apt = '': no lists of packages. Remedy: apt-get update" >&2; exit 2; }
closure python3 python3-venv "$libpython" ca-certificates openssl redis-server redis-sentinel haproxy prometheus prometheus-alertmanager prometheus-redis-exporter wget |
    comm -13 "$base" - | sed "s|^|$VERSION_CODENAME/$(dpkg --print-architecture) |"
