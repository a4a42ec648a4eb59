#!/bin/sh
# Install Debian packages in an image, in the versions of packages.txt beside it; releases without a line there get the
# newest. A version that the mirror has no more ends the build: renew packages.txt by pin.sh, or build with PINNED=0.
set -eu
. /etc/os-release
pins=$(sed -n "s|^$VERSION_CODENAME/$(dpkg --print-architecture) ||p" "$(dirname "$0")/packages.txt")
[ "${PINNED:-1}" = 1 ] || pins=
preferences=/etc/apt/preferences.d/pinned
for pin in $pins; do printf 'Package: %s\nPin: version %s\nPin-Priority: 1001\n\n' "${pin%%=*}" "${pin#*=}"; done > "$preferences"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
for pin in $pins; do
    found=$(dpkg-query -W -f '${Version}' "${pin%%=*}" 2>/dev/null) || continue
    [ -z "$found" ] || [ "$found" = "${pin#*=}" ] || { echo "error: ${pin%%=*} = '$found': not ${pin#*=}, as packages.txt has it. Remedy: renew packages.txt by deploy/images/pin.sh, or build with PINNED=0" >&2; exit 2; }
done
rm -rf "$preferences" /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/* /usr/share/doc /usr/share/man
find / -xdev -type f -perm /6000 -exec chmod a-s {} +
