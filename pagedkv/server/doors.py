"""What every request passes before it is looked at: the key, the length of its body, the time it takes to arrive.

Takes ASGI messages and gives them on, the body whole; refuses to parse anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from typing import TYPE_CHECKING

from pagedkv.server.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pagedkv.server.config import ServerConfig

_OPEN_PATHS = frozenset({"/health"})  # load balancers have no key


class Doors:
    """ASGI middleware that refuses a request without the key, or with a body too long or too slow."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._key = None if config.api_key is None else _digest(config.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._require_key(scope)
            body = await self._whole_body(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _Replay(body, receive), send)

    def _require_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in _OPEN_PATHS:
            return
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        # Digests have one length, so the comparison's time says nothing about the key, not even how long it is.
        if not hmac.compare_digest(self._key, _digest(token.strip())) or scheme.lower() != b"bearer":
            raise ApiError(
                401,
                "the request must carry the server's key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _whole_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None if the client has gone before its end."""
        declared = _header(scope, b"content-length")
        if declared.isdigit():
            self._require_length(int(declared))
        parts: list[bytes] = []
        length = 0
        try:
            async with asyncio.timeout(self._config.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    length += len(parts[-1])
                    self._require_length(length)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body must arrive within {self._config.body_timeout:g} seconds") from None

    def _require_length(self, length: int) -> None:
        most = self._config.max_body_bytes
        if length > most:
            # What the client is still sending is not read: its connection cannot be used again.
            headers = {"Connection": "close"}
            raise ApiError(413, f"the body must be at most {most:,} bytes", code="body_too_large", headers=headers)


class _Replay:
    """Receives the body that has been read already, and after it what the connection says."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
