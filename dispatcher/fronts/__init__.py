"""Fronts: protocols of clients (KServe v2 over gRPC and HTTP), and access control."""
