"""A server on a real loopback port, in a thread of the test's process, over a real tiny model or a scripted one."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn

from pagedkv.engine import AsyncEngine, Engine
from pagedkv.server import ServerConfig, bind, create_app
from tests.engine.scripted import make_core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NAME = "tiny"
PATIENCE = 120.0


class ByteTokenizer:
    """Every byte is a token; a chat is its messages' contents, one after the other."""

    chat_template = "contents"

    def encode(self, text: str) -> list[int]:
        """Return the text's bytes."""
        return list(text.encode())

    def decode(self, token_ids: list[int], **_: object) -> str:
        """Return the bytes' text."""
        return bytes(token_ids).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> dict[str, list[int]]:
        """Return the contents' bytes."""
        return {"input_ids": self.encode("".join(message["content"] for message in messages))}


def saying(text: str) -> Callable[[Sequence[int]], int]:
    """Return a rule that says ``text`` over and over after a prompt that ends with a newline."""
    raw = text.encode()

    def rule(tokens: Sequence[int]) -> int:
        start = len(tokens) - list(tokens)[::-1].index(10)
        return raw[(len(tokens) - start) % len(raw)]

    return rule


def scripted_engine(rule: Callable[[Sequence[int]], int], *, delay: float = 0.0, **options: Any) -> Engine:
    """Return an engine of bytes that follows ``rule``, each step ``delay`` seconds slow."""
    core, _, runner = make_core(rule=rule, vocab_size=256, **{"num_pages": 512, **options})
    runner.vocab = 256
    forward = runner.forward

    def slow(*arguments: Any) -> Any:
        time.sleep(delay)
        return forward(*arguments)

    runner.forward = slow  # type: ignore[method-assign, assignment]
    return Engine.from_core(core, ByteTokenizer())


class Running(NamedTuple):
    """A server that runs: its port, its engine for asyncio, the one below, and how to end it."""

    port: int
    served: AsyncEngine
    engine: Engine
    server: uvicorn.Server

    @property
    def url(self) -> str:
        """Where clients of OpenAI's API go."""
        return f"http://127.0.0.1:{self.port}/v1"

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the server is about to do."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "the server does not get there"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Wait until no request is unfinished, and assert that no page is held."""
        self.wait_until(lambda: self.served.num_requests == 0 and not self.engine.has_unfinished)
        self.wait_until(lambda: self.served.usage.in_use == 0)


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[Running]:
    """Serve ``engine`` on a free port until the end of the block."""
    app = create_app(engine, ServerConfig(**{"model_name": NAME, "grace": 5.0, **options}))
    settings = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=5)
    server = uvicorn.Server(settings)
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    here = Running(port, app.state.engine, engine, server)
    try:
        here.wait_until(lambda: server.started or not thread.is_alive())
        yield here
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        bound.close()
        assert not thread.is_alive()


class Reply(NamedTuple):
    """A response: its status, its headers and what its body says."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a refusal; fails where there is none."""
        return dict(json.loads(self.body)["error"])


def request(port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
    """Send one request as it is, without a client's help; ``body`` is bytes, or becomes JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()
