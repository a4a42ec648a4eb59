"""Routing: tables made of plan and nodes, family queues, routers and queues."""
