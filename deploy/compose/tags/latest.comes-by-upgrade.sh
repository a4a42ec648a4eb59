# Tag that `docker compose up -d` may start; deploy/compose/upgrade.sh makes one of each tag that it has rolled out.
