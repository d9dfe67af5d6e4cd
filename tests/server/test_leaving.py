"""Clients that go, models that fail, text that comes in halves: pages are freed and everybody hears the truth."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.server.running import NAME, Running, request, running, saying, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

FOX = "née 🦊 "


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server that says the fox's line, some milliseconds a byte."""
    with running(scripted_engine(saying(FOX), delay=0.002)) as here:
        yield here


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def long(**options: Any) -> dict[str, Any]:
    """Return a request that would run for seconds."""
    return {"model": NAME, "prompt": "a\n", "max_tokens": 1500, "temperature": 0, **options}


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_is_left_is_aborted(server: Running, client: openai.OpenAI, n: int) -> None:
    """The client closes its stream in the middle: the request ends and no page stays in use."""
    aborted = server.served.stats.finished["abort"]
    stream = client.completions.create(stream=True, n=n, **long())
    for _, _chunk in zip(range(4), stream, strict=False):
        assert server.served.num_requests == 1
    stream.close()
    server.wait_until_idle()

    assert aborted + n == server.served.stats.finished["abort"]


def test_a_client_that_hangs_up_while_it_waits_is_aborted(server: Running) -> None:
    """Without streaming too: the connection's end is the request's end, for every prompt of it."""
    aborted = server.served.stats.finished["abort"]
    body = json.dumps(long(prompt=["a\n", "b\n"])).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        server.wait_until(lambda: server.served.num_running == 2)
    server.wait_until_idle()

    assert aborted + 2 == server.served.stats.finished["abort"]


def test_a_client_that_leaves_before_its_body_is_there_starts_nothing(server: Running) -> None:
    """Half a request is none."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    steps = server.served.stats.steps
    assert 200 == request(server.port, "GET", "/health").status
    server.wait_until_idle()
    assert steps == server.served.stats.steps


def test_no_character_is_streamed_in_halves(client: openai.OpenAI) -> None:
    """Characters of two and four bytes come whole, and none of them is ever replaced by marks (vllm#48853)."""
    size = 3 * len(FOX.encode())
    stream = client.completions.create(stream=True, **long(max_tokens=size))
    pieces = [choice.text for chunk in stream for choice in chunk.choices]

    assert FOX * 3 == "".join(pieces)
    assert set(FOX) == set(pieces)


def test_a_cut_character_ends_the_same_streamed_or_whole(client: openai.OpenAI) -> None:
    """Cut off inside the fox, the text ends with what the tokenizer makes of half a fox, both ways."""
    cut = len("née ".encode()) + 2
    whole = client.completions.create(**long(max_tokens=cut))
    stream = client.completions.create(stream=True, **long(max_tokens=cut))

    assert "née \ufffd" == whole.choices[0].text
    assert whole.choices[0].text == "".join(choice.text for chunk in stream for choice in chunk.choices)


def test_parts_of_a_character_have_bytes(client: openai.OpenAI) -> None:
    """A token that is no text of its own says so; what is known of it is told."""
    found = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "a\n"}], max_tokens=3, temperature=0, logprobs=True
    )
    content = found.choices[0].logprobs.content if found.choices[0].logprobs else None
    assert content is not None
    assert [("n", [110]), ("\ufffd", None), ("\ufffd", None)] == [(one.token, one.bytes) for one in content]


def test_a_failing_model_is_a_500_and_no_hang() -> None:
    """When the model raises, a waiting client gets 500, a streaming one an error event; the next one is served."""
    engine = scripted_engine(saying(FOX), delay=0.002)
    with running(engine) as here, openai.OpenAI(base_url=here.url, api_key="none", max_retries=0) as client:
        runner: Any = engine.core.runner
        runner.rule, rule = (lambda text: 1 // 0), runner.rule
        reply = request(here.port, "POST", "/v1/completions", long())
        assert (500, "step_failed", "server_error") == (reply.status, reply.error["code"], reply.error["type"])
        assert b"division" not in reply.body

        runner.rule = rule
        stream = client.completions.create(stream=True, **long())
        next(iter(stream))
        runner.rule = lambda text: 1 // 0
        with pytest.raises(openai.APIError, match="the model failed while it ran this request"):
            list(stream)
        runner.rule = rule
        assert FOX == client.completions.create(**long(max_tokens=len(FOX.encode()))).choices[0].text
        here.wait_until_idle()


def test_shutdown_ends_what_runs(client: openai.OpenAI) -> None:
    """Told to end, a server finishes running streams; those over its grace hear why they end."""
    with running(scripted_engine(saying(FOX), delay=0.01)) as here:
        own = client.with_options(base_url=here.url)
        stream = own.completions.create(stream=True, **long(max_tokens=30))
        next(iter(stream))
        here.server.should_exit = True
        assert 29 <= sum(len(choice.text.encode()) for chunk in stream for choice in chunk.choices) + 1
    assert 0 == here.engine.backend.usage().in_use


def test_metrics(server: Running, client: openai.OpenAI) -> None:
    """Prometheus' text has the engine's counters, what the cache holds now, and a wait for every finished sample."""
    server.wait_until_idle()
    client.completions.create(**long(max_tokens=5))
    server.wait_until_idle()
    reply = request(server.port, "GET", "/metrics")
    lines = reply.body.decode().splitlines()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    stats = server.served.stats

    assert reply.headers["content-type"].startswith("text/plain")
    assert stats.new_tokens == values["pagedkv_new_tokens_total"]
    assert stats.finished["length"] == values['pagedkv_finished_samples_total{reason="length"}']
    assert sum(stats.finished.values()) == values["pagedkv_request_seconds_count"]
    assert 0 == values["pagedkv_cache_pages_in_use"] == values["pagedkv_running_samples"]
    assert values["pagedkv_time_between_tokens_seconds_count"] >= 4
