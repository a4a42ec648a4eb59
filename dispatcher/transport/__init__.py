"""gRPC of the data path: HTTP/2 by libnghttp2, in the worker's event loop."""
