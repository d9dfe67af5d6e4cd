"""What the server does not take: strangers, bodies too long or too slow, more than it can queue, what is no request."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.server import ServerConfig, bind, create_app
from tests.engine.scripted import hashed, make_core
from tests.server.running import Running, request, running, saying, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedkv.engine import EngineCore

KEY = "a-key-of-ours"
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "a\n", "max_tokens": 1500, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server without a key, that takes bodies of 1,000 bytes within half a second and two requests."""
    engine = scripted_engine(saying("hello "), delay=0.002)
    with running(engine, max_requests=2, max_body_bytes=1000, body_timeout=0.5) as here:
        yield here


def test_a_request_brings_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both paths hand ``priority`` on to the engine, 0 where there is none."""
    engine = scripted_engine(saying("hello "), scheduling="priority")
    queued: list[int] = []
    inner = engine.core.add_request

    def add_request(*arguments: Any, priority: int = 0) -> None:
        queued.append(priority)
        inner(*arguments, priority=priority)

    monkeypatch.setattr(engine.core, "add_request", add_request)
    with running(engine) as here:
        for path, prompt in ((PATH, {"prompt": "a\n"}), (CHAT, {"messages": [{"role": "user", "content": "a\n"}]})):
            for own in ({"priority": -7}, {}):
                assert request(here.port, "POST", path, {**prompt, **own, "max_tokens": 2}).status == 200

    assert queued == [-7, 0, -7, 0]


def test_only_the_key_opens() -> None:
    """Without the right bearer token everything but /health is 401; near misses are strangers too."""
    with running(scripted_engine(hashed), api_key=KEY) as here:
        for header in ("", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \xff"):
            for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere")):
                reply = request(here.port, method, path, {"prompt": "x"}, {"Authorization": header})
                assert (401, "invalid_api_key") == (reply.status, reply.error["code"])
                assert KEY.encode() not in reply.body
        assert 200 == request(here.port, "GET", "/health").status
        for header in (f"Bearer {KEY}", f"bearer  {KEY}"):
            reply = request(here.port, "POST", PATH, {"prompt": "x", "max_tokens": 1}, {"Authorization": header})
            assert 200 == reply.status


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the body must be JSON"),
        (b"", "the body must be given"),
        (b"[]", "the body must be a JSON object"),
        (b'"text"', "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b"\xff\xfe", "body"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature must be finite"),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature: Input should be a valid number, was 'hot'"),
        (b'{"prompt": "x", "n": true}', "n: Input should be a valid integer"),
        (b'{"prompt": "x", "max_tokens": 1e400}', "max_tokens"),
        (b'{"prompt": "\\ud800"}', "prompt must be text that UTF-8 can hold"),
        (b'{"prompt": "x", "\\ud800": 1}', "the body must be a JSON object"),
        (b'{"prompt": ["x", 5]}', "prompt must be text or a list of token ids, or a list of either"),
        (b"{" * 900, "the body must be JSON"),
        (b"[" * 990, "body"),
        (b'{"prompt": "x", "seed": ' + b"9" * 900 + b"}", "seed must be 0 to"),
    ],
)
def test_what_is_no_request_is_a_400(server: Running, body: bytes, said: str) -> None:
    """Broken JSON, wrong types and text that is no text are refused with a reason, and never a 500."""
    reply = request(server.port, "POST", PATH, body)

    assert (400, "invalid_request_error") == (reply.status, reply.error["type"])
    assert said in reply.error["message"]


def test_unknown_paths_and_methods(server: Running) -> None:
    """They answer in the same JSON as everything else."""
    assert (404, "invalid_request_error") == (
        (reply := request(server.port, "GET", "/v2")).status,
        reply.error["type"],
    )
    assert 405 == request(server.port, "GET", PATH).status
    assert 404 == request(server.port, "GET", "/docs").status
    text = request(server.port, "POST", PATH, {"prompt": "x"}, {"Content-Type": "text/plain"})
    assert 400 == text.status


def test_long_bodies_are_refused_before_they_are_read(server: Running) -> None:
    """A declared length over the limit is 413 at once, and so is an undeclared one when it gets there."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: 1001\r\n\r\n".encode())
        assert b"HTTP/1.1 413" in connection.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        connection.sendall(b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        assert b"HTTP/1.1 413" in connection.recv(4096)
    fitting = json.dumps({"prompt": "x\n", "max_tokens": 1, "user": ""})
    fitting = fitting.replace('""', '"' + "u" * (1000 - len(fitting)) + '"')
    assert (1000, 200) == (len(fitting), request(server.port, "POST", PATH, fitting.encode()).status)


def test_slow_bodies_are_refused(server: Running) -> None:
    """A client that does not finish its body in time gets 408 instead of a place."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{{".encode())
        assert b"HTTP/1.1 408" in connection.recv(4096)


def test_beyond_the_queue_is_a_429_with_a_time(server: Running) -> None:
    """With max_requests unfinished the next one is told to come back, and is served when it does."""
    streams = []
    for _ in range(2):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        body = json.dumps(LONG).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert b"HTTP/1.1 200" in connection.recv(100)
        streams.append(connection)
    reply = request(server.port, "POST", PATH, {"prompt": "x"})
    assert (429, "too_many_requests", "rate_limit_error") == (reply.status, reply.error["code"], reply.error["type"])
    assert 1 <= int(reply.headers["retry-after"])
    for connection in streams:
        connection.close()
    server.wait_until_idle()
    assert 200 == request(server.port, "POST", PATH, {"prompt": "x\n", "max_tokens": 2}).status


def test_a_server_that_drains_is_unavailable(server: Running) -> None:
    """While the engine takes no requests the answer is 503 with a time, and /health says so."""
    server.served._refusal = "is shutting down"
    try:
        reply, health = request(server.port, "POST", PATH, {"prompt": "x"}), request(server.port, "GET", "/health")
        assert (503, "unavailable") == (reply.status, reply.error["code"])
        assert "retry-after" in reply.headers
        assert (503, b'{"status":"the engine is shutting down"}') == (health.status, health.body)
    finally:
        server.served._refusal = None
    assert 200 == request(server.port, "GET", "/health").status


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_name": " "}, "model_name must be a name"),
        ({"api_key": ""}, "api_key must be printable ASCII"),
        ({"api_key": "a b"}, "api_key must be printable ASCII"),
        ({"max_requests": 0}, "max_requests must be"),
        ({"max_body_bytes": 0}, "max_body_bytes must be"),
        ({"body_timeout": -1}, "body_timeout must be"),
        ({"grace": float("nan")}, "grace must be"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, Any], said: str) -> None:
    """Every limit is checked where it is given."""
    with pytest.raises(ValueError, match=said):
        ServerConfig(**{"model_name": "m", **options})


def test_an_engine_without_a_tokenizer_is_refused() -> None:
    """Text cannot be served without one."""
    from pagedkv.engine import Engine

    core: EngineCore = make_core()[0]
    with pytest.raises(ValueError, match="engine must have a tokenizer"):
        create_app(Engine.from_core(core), ServerConfig(model_name="m"))


def test_a_taken_port_is_an_error_before_anything_else() -> None:
    """A port that somebody has cannot be bound a second time."""
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", first.getsockname()[1])
