"""The application under uvicorn, from an open port to the last answer.

Takes an engine, a config and a bound socket; returns when a signal has ended the server: it takes no more connections
then, running answers have their grace to end, and the rest are told and aborted.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from pagedkv.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagedkv.engine import AsyncEngine, Engine
    from pagedkv.server.config import ServerConfig

_LAST_WORDS = 5.0  # seconds for connections to take in how their aborted answers end


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that has ``port`` of ``host`` and does not listen yet; port 0 is any free one.

    Raises:
        OSError: if there is no such host here, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def serve(
    engine: Engine, config: ServerConfig, bound: socket.socket, *, on_start: Callable[[], None], access_log: bool
) -> None:
    """Serve until SIGINT or SIGTERM; a second SIGINT waits for nobody. ``on_start`` is called once clients can come."""
    app = create_app(engine, config)
    settings = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        timeout_graceful_shutdown=int(config.grace + _LAST_WORDS + 1),
    )
    server = _Server(settings, app.state.engine, config.grace, on_start)
    with _deaf_after(signal.SIGINT, signal.SIGTERM):
        asyncio.run(server.serve(sockets=[bound]))
    if not server.started:
        raise RuntimeError("the server must start, did not; what it logged says why")


class _Server(uvicorn.Server):
    """Uvicorn, which lets the engine drain while it waits for its connections to end."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, grace: float, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace = grace
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._engine.drain(self._grace))
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()


@contextmanager
def _deaf_after(*signals: signal.Signals) -> Iterator[None]:
    """Let uvicorn raise again what has ended it, as it does at its very end, without ending the process by it."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
