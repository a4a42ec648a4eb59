"""The service around routing: state from Redis, accounting, metrics, administration, shutdown."""
