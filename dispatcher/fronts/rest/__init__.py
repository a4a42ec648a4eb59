"""KServe v2 over HTTP/1.1 with Triton's extensions, answered by the same routers, queues and credits as gRPC."""
