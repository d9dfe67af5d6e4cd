"""The application: which path does what.

Takes an engine and a config, gives an ASGI application that owns the engine from its start-up to its shutdown; refuses
to know how it is run.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pagedkv import __version__
from pagedkv.engine import AsyncEngine, Engine
from pagedkv.server import errors
from pagedkv.server.answers import Answer, begin
from pagedkv.server.chat import ChatShape
from pagedkv.server.completions import CompletionShape
from pagedkv.server.doors import Doors
from pagedkv.server.errors import ApiError
from pagedkv.server.fields import ChatFields, CompletionFields  # noqa: TC001  (FastAPI reads the annotations)
from pagedkv.server.metrics import Metrics
from pagedkv.server.token_text import TokenText

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pagedkv.server.config import ServerConfig

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for plain text; a chat's answer may fill the context


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """Return the application over ``engine``, which needs a tokenizer and which nobody else uses while it runs.

    ``app.state.engine`` is its `AsyncEngine`.
    """
    if engine.tokenizer is None:
        raise ValueError("engine must have a tokenizer to be served over HTTP, had none")
    metrics = Metrics()
    served = AsyncEngine(engine, max_requests=config.max_requests, observe=metrics.observe)
    metrics.watch(served)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with served:
            yield

    # No pages of documentation: they would load scripts from elsewhere. The schema itself is at /openapi.json.
    app = FastAPI(title="pagedkv", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine = served
    errors.install(app)
    app.add_middleware(Doors, config=config)
    _add_generation(app, served, config, TokenText(engine.tokenizer))
    _add_information(app, served, config, metrics)
    return app


def _add_generation(app: FastAPI, engine: AsyncEngine, config: ServerConfig, token_text: TokenText) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(fields: CompletionFields, request: Request) -> Response:
        """Go on where a prompt ends."""
        _require_model(fields.model, config)
        streams = await begin(
            engine,
            fields,
            [(prompt, None) for prompt in fields.prompt],
            max_new_tokens=_COMPLETION_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
            limit_name="max_tokens",
            logprobs=fields.logprobs,
        )
        shape = CompletionShape(None if fields.logprobs is None else token_text)
        return await Answer(config.model_name, fields, shape, streams).response(request.receive)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(fields: ChatFields, request: Request) -> Response:
        """Answer as the assistant of a chat."""
        _require_model(fields.model, config)
        old = fields.max_completion_tokens is None and fields.max_tokens is not None
        streams = await begin(
            engine,
            fields,
            [(None, [message.for_template() for message in fields.messages])],
            max_new_tokens=fields.max_tokens if old else fields.max_completion_tokens,
            limit_name="max_tokens" if old else "max_completion_tokens",
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        )
        shape = ChatShape(token_text if fields.logprobs else None)
        return await Answer(config.model_name, fields, shape, streams).response(request.receive)


def _add_information(app: FastAPI, engine: AsyncEngine, config: ServerConfig, metrics: Metrics) -> None:
    card = {
        "id": config.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "pagedkv",
        "max_model_len": engine.max_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe it."""
        _require_model(name, config)
        return card

    @app.get("/health")
    async def health() -> JSONResponse:
        """Say whether requests are taken."""
        if engine.refusal is not None:
            return JSONResponse({"status": f"the engine {engine.refusal}"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def scrape() -> Response:
        """Tell Prometheus everything."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _require_model(name: str | None, config: ServerConfig) -> None:
    if name is not None and name != config.model_name:
        raise ApiError(
            404, f"model must be {config.model_name!r}, was {name!r:.80}", param="model", code="model_not_found"
        )
