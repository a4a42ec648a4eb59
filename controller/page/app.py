"""The page's HTTP application: three paths, GET alone, and the token of the admin port where one is set.

A browser sends no `Authorization` of its own: the link of `trefoil up` carries the token once, as `?token=`, and the
answer to it keeps it in a cookie. A password (any user name) and `Authorization: Bearer` do as well.
"""

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.page.frames import Frames
from trefoil import page
from trefoil.core.errors import Unavailable
from trefoil.runtime.security.scopes import Tokens

SCRIPT: Final = Path(__file__).with_name("live.js")
NO_TOKEN: Final = "no valid token. Remedy: open the link that `trefoil up` printed, or give the token as the password\n"
NOT_HERE: Final = "this page answers on loopback names alone, as it asks for no token\n"
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
PERMISSIONS: Final = "camera=(), geolocation=(), microphone=()"


def make_app(frames: Frames, tokens: Tokens, cluster: str, names: Collection[str] = LOOPBACK_NAMES) -> ASGIApp:
    """Application of the page. `tokens`: those of the admin port; `names`: hosts that it answers to without one, all
    where there are none.
    """
    shell, script = page.render("live.html.j2", title=cluster), SCRIPT.read_text(encoding="utf-8")

    def index(_: Request) -> Response:
        return Response(shell, media_type="text/html")

    def live_js(_: Request) -> Response:
        return Response(script, media_type="text/javascript")

    routes = [Route("/", index), Route("/live.js", live_js), Route("/events", Events(frames), methods=["GET"])]
    guards = [Middleware(Headers, policy=_content_policy(shell)), Middleware(Guard, tokens=tokens, names=names)]
    return Starlette(routes=routes, middleware=guards)


class Events:
    """Server-sent events: each is a frame, as a JSON text."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._frames.viewer():
                await StreamingResponse(self._lines(), media_type="text/event-stream")(scope, receive, send)
        except Unavailable as error:
            await PlainTextResponse(f"{error}\n", status_code=503)(scope, receive, send)

    async def _lines(self) -> AsyncIterator[str]:
        async for frame in self._frames.watch():
            yield f"data: {json.dumps(frame)}\n\n"


class Headers:
    """Headers of every answer: the page loads nothing of another host, stands in no frame and is not cached."""

    def __init__(self, app: ASGIApp, policy: str) -> None:
        self._app = app
        named = {
            "content-security-policy": policy,
            "x-frame-options": "DENY",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "permissions-policy": PERMISSIONS,
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-store",
        }
        self._headers = [(name.encode(), value.encode()) for name, value in named.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self._app(scope, receive, with_headers)


class Guard:
    """Lets in who has the token. Where none is set, only who names this machine: no other site's script, by a name
    that it has made point here.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, names: Collection[str]) -> None:
        self._app, self._tokens, self._names = app, tokens, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (self._app if refused is None else refused)(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if self._tokens.control is None:
            name = re.sub(r":\d+$", "", request.headers.get("host", ""))
            return PlainTextResponse(NOT_HERE, status_code=421) if self._names and name not in self._names else None
        linked = request.query_params.get("token")
        if linked is not None and self._valid(f"Bearer {linked}"):
            answer = RedirectResponse("/", status_code=303)
            secure = request.url.scheme == "https"
            answer.set_cookie(_cookie(request), linked, httponly=True, samesite="lax", secure=secure)
            return answer
        if any(map(self._valid, _shown_tokens(request))):
            return None
        return PlainTextResponse(NO_TOKEN, status_code=401, headers={"www-authenticate": 'Basic realm="trefoil"'})

    def _valid(self, authorization: str) -> bool:
        return bool(self._tokens.scope({"authorization": authorization}))


def _cookie(request: Request) -> str:
    """Name of the cookie: a host's cookies are those of all its ports."""
    return f"trefoil_{request.url.port}"


def _shown_tokens(request: Request) -> list[str]:
    """What a request shows, as the admin port's `authorization`."""
    given = request.headers.get("authorization", "")
    kind, _, value = given.partition(" ")
    if kind.lower() == "basic":
        try:
            given = f"Bearer {base64.b64decode(value, validate=True).decode().partition(':')[2]}"
        except ValueError:
            given = ""
    return [given, f"Bearer {request.cookies.get(_cookie(request), '')}"]


def _content_policy(shell: str) -> str:
    """Content-Security-Policy of the page: our script, our styles by their hash, our events."""
    styles = re.findall(r"<style>(.*?)</style>", shell, re.DOTALL)
    hashes = (base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() for style in styles)
    rules: dict[str, Any] = {
        "default-src": "'none'",
        "script-src": "'self'",
        "connect-src": "'self'",
        "style-src": " ".join(f"'sha256-{one}'" for one in hashes),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
