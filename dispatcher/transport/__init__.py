"""gRPC on either transport: HTTP/2 by libnghttp2 in the worker's own event loop, or grpc.aio behind the same seam."""
