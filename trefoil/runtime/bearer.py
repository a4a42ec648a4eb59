"""Bearer token, added to each call of a gRPC channel."""

from typing import Any

import grpc


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {token}"))
    return details._replace(metadata=metadata)


class UnaryToken(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Interceptor that adds the token to calls with one answer."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class StreamToken(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Interceptor that adds the token to calls with a stream of answers."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)
