"""KServe v2 over gRPC: unary calls, streams and health."""
