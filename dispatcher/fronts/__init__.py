"""Fronts: what clients speak to (KServe v2 over gRPC and HTTP), and who may."""
