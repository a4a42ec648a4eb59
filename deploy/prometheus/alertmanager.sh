#!/bin/sh
# Alertmanager of a deployment: each alert to one webhook, TREFOIL_ALERT_WEBHOOK. TrefoilWatchdog, which always fires, goes
# every minute to TREFOIL_WATCHDOG_WEBHOOK, a service that reports when it no longer comes. Without a URL alerts are shown on
# Alertmanager's page alone. Alertmanager reads no environment, so its configuration is written at each start.
set -eu
receiver() {  # NAME URL
    case $2 in
    "") echo "  - name: $1" ;;
    *[\"\\\ ]*) echo "error: webhook = '$2': holds a quote, a backslash or a space. Remedy: write them as %22, %5C, %20" >&2; exit 2 ;;
    http://* | https://*) printf '  - name: %s\n    webhook_configs: [{url: "%s", send_resolved: true}]\n' "$1" "$2" ;;
    *) echo "error: webhook = '$2': no http(s) URL. Remedy: set TREFOIL_ALERT_WEBHOOK and TREFOIL_WATCHDOG_WEBHOOK" >&2; exit 2 ;;
    esac
}
folder=${TMPDIR:-/tmp}
alerts=$(receiver alerts "${TREFOIL_ALERT_WEBHOOK:-}")
watchdog=$(receiver watchdog "${TREFOIL_WATCHDOG_WEBHOOK:-}")
cat >"$folder/alertmanager.yml" <<CONFIG
route:
  receiver: alerts
  group_by: [cluster, alertname, job]
  group_wait: ${TREFOIL_ALERT_WAIT:-30s}
  group_interval: 5m
  repeat_interval: 4h
  routes:
    - {receiver: watchdog, matchers: [alertname = TrefoilWatchdog], group_wait: 0s, group_interval: 1m, repeat_interval: 1m}
receivers:
$alerts
$watchdog
CONFIG
exec alertmanager --config.file="$folder/alertmanager.yml" --storage.path="$folder/alertmanager" --cluster.listen-address= "$@"
