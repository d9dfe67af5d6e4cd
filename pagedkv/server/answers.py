"""From a checked request to its answer: prompts into the engine, its outputs into JSON, whole or as events.

Takes a request's fields and the shape of its answers, gives responses, and refuses to know the two shapes that
OpenAI's API has. A client that goes, before the end or in the middle of it, ends its requests in the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastapi.responses import JSONResponse, Response

from pagedkv import __version__
from pagedkv.engine import EngineStopped, StepFailed
from pagedkv.server.departure import ClientGone, while_connected
from pagedkv.server.errors import ApiError, of_argument, of_engine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.types import Receive, Scope, Send

    from pagedkv.engine import AsyncEngine, AsyncStream, Completion, Sample, StepOutput
    from pagedkv.server.fields import GenerationFields

    Json = dict[str, Any]
    Prompt = tuple[str | list[int] | None, list[dict[str, str]] | None]

_CLIENT_CLOSED_REQUEST: Final = 499  # nobody reads it; nginx's word for the log


class Shape(Protocol):
    """How one endpoint writes an answer."""

    prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, sample: Sample) -> Json:
        """Return the choice ``index`` of an answer that is sent whole."""

    def opening(self, index: int) -> Json | None:
        """Return what a stream says of a choice before its first token."""

    def pieces(self, index: int, output: StepOutput) -> list[Json]:
        """Return what a stream says of a choice when ``output`` has come."""


@dataclass(slots=True)
class Usage:
    """What an answer cost, in tokens; several prompts and samples together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def json(self) -> Json:
        """Return it in OpenAI's words."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def begin(
    engine: AsyncEngine,
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | None,
    limit_name: str,
    logprobs: int | None,
) -> list[AsyncStream]:
    """Queue a request for each prompt, all of them or none.

    ``max_new_tokens`` None: what the context has left; ``limit_name`` is what the client calls it.

    Raises:
        ApiError: for what the client can put right.
        EngineBusy, EngineStopped: as `AsyncEngine.submit` does.
    """
    if len(prompts) > engine.max_requests:
        raise ApiError(400, f"prompt must be at most {engine.max_requests} prompts, was {len(prompts)}", param="prompt")
    streams: list[AsyncStream] = []
    try:
        for prompt, messages in prompts:
            tokens = await engine.tokenize(prompt, messages=messages)
            new = max(1, engine.max_len - len(tokens)) if max_new_tokens is None else max_new_tokens
            params = fields.sampling_params(new, logprobs)
            if len(tokens) + new > engine.max_len:
                raise ApiError(
                    400,
                    f"the prompt and {limit_name} must together be at most {engine.max_len} tokens, "
                    f"were {len(tokens)} + {new} = {len(tokens) + new}",
                    param="messages" if prompt is None else "prompt",
                    code="context_length_exceeded",
                )
            streams.append(await engine.submit(tokens, params, priority=fields.priority))
    except BaseException as error:
        for stream in streams:
            stream.close()
        if isinstance(error, ValueError | TypeError):
            names = {"max_new_tokens": limit_name, "min_new_tokens": "min_tokens"}
            raise of_argument(error, names) from error
        raise
    return streams


class Answer:
    """One HTTP request's answer, from the moment that the engine has its prompts."""

    def __init__(self, model: str, fields: GenerationFields, shape: Shape, streams: list[AsyncStream]) -> None:
        self._fields = fields
        self._shape = shape
        self._streams = streams
        self._head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "object": shape.chunk_object if fields.stream else shape.whole_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"pagedkv-{__version__}",
        }

    async def response(self, receive: Receive) -> Response:
        """Return the response; of a stream only its beginning has happened then."""
        if self._fields.stream:
            return EventStream(self._events())
        try:
            return JSONResponse(await while_connected(receive, self._whole()))
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            self._close()

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()

    async def _whole(self) -> Json:
        completions = [await stream.completion() for stream in self._streams]
        usage = Usage()
        choices = []
        for place, completion in enumerate(completions):
            for index, sample in enumerate(completion.samples):
                if sample.finish_reason == "abort":
                    raise EngineStopped("the server is shutting down")
                choices.append(self._shape.whole(place * self._fields.n + index, sample))
            _count(usage, completion)
        return {**self._head, "choices": choices, "usage": usage.json()}

    async def _events(self) -> AsyncGenerator[Json]:
        """Yield a stream's chunks; an error, once the stream has begun, is its last."""
        told = self._fields.include_usage
        usage = Usage(prompt_tokens=sum(len(stream.prompt_token_ids) for stream in self._streams))
        try:
            for index in range(len(self._streams) * self._fields.n):
                opening = self._shape.opening(index)
                if opening is not None:
                    yield self._chunk([opening], told)
            async with aclosing(_interleaved(self._streams)) as outputs:
                async for place, output in outputs:
                    if output.finish_reason == "abort":
                        raise EngineStopped("the server is shutting down")
                    usage.completion_tokens += len(output.token_ids)
                    if output.metrics is not None and output.index == 0:
                        usage.cached_tokens += output.metrics.cached_tokens
                    for piece in self._shape.pieces(place * self._fields.n + output.index, output):
                        yield self._chunk([piece], told)
            if told:
                yield {**self._head, "choices": [], "usage": usage.json()}
        except (EngineStopped, StepFailed) as error:
            yield of_engine(error).body
        finally:
            self._close()

    def _chunk(self, choices: list[Json], told: bool) -> Json:
        chunk = {**self._head, "choices": choices}
        return {**chunk, "usage": None} if told else chunk


class EventStream(Response):
    """A response of server-sent events, each a JSON object, and ``[DONE]`` after the last."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Json]) -> None:
        """Tell proxies to pass each event on as it comes."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, for as long as the client is there."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGone:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                await _send_data(send, json.dumps(event, ensure_ascii=False, separators=(",", ":")))
            await _send_data(send, "[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_data(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _interleaved(streams: Sequence[AsyncStream]) -> AsyncGenerator[tuple[int, StepOutput]]:
    """Yield the outputs of all streams as they come, each with its stream's place."""
    waiting = {asyncio.ensure_future(anext(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place = waiting.pop(task)
                output = task.result()
                if not output.ends_request:
                    waiting[asyncio.ensure_future(anext(streams[place]))] = place
                yield place, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _count(usage: Usage, completion: Completion) -> None:
    usage.prompt_tokens += len(completion.prompt_token_ids)
    usage.completion_tokens += sum(sample.metrics.new_tokens for sample in completion.samples)
    usage.cached_tokens += completion.metrics.cached_tokens
