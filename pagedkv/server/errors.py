"""Refusals as OpenAI's clients expect them: an HTTP status and one JSON object that says what is wrong.

Takes whatever is raised on the way to an answer and gives its response; refuses to show what a client cannot put right.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pagedkv.engine import EngineBusy, EngineStopped, StepFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI, Request

log = logging.getLogger("pagedkv.server")
_RETRY = {"Retry-After": "1"}


class ApiError(HTTPException):
    """A refusal: its status, and in ``body`` OpenAI's ``message``, ``type``, ``param`` and ``code``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.body = {"error": {"message": message, "type": _type_of(status), "param": param, "code": code}}

    def response(self) -> JSONResponse:
        """Return it as a response."""
        return JSONResponse(self.body, self.status_code, self.headers)


def _type_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")


def of_argument(error: ValueError | TypeError, names: Mapping[str, str], param: str | None = None) -> ApiError:
    """Return the refusal of a bad argument, with which the engine's message begins; ``names`` are the client's."""
    message = str(error)
    for own, shown in names.items():
        message = message.replace(own, shown)
    return ApiError(400, _printable(message), param=param or _printable(re.split(r"[\[' ]", message)[0]))


def of_engine(error: EngineBusy | EngineStopped | StepFailed) -> ApiError:
    """Return the refusal of a request that the engine has no place for, now or any more, or that it failed on."""
    if isinstance(error, EngineBusy):
        return ApiError(429, str(error), code="too_many_requests", headers=_RETRY)
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="unavailable", headers=_RETRY)
    log.error("a step failed", exc_info=error)
    return ApiError(500, "the model failed while it ran this request; the server's log says why", code="step_failed")


def _of_validation(error: RequestValidationError) -> ApiError:
    """Return the refusal of a body that is no JSON or has not a request's fields: its first fault, by its place."""
    fault: Mapping[str, Any] = error.errors()[0]
    kind, place = fault["type"], [part for part in fault["loc"] if part != "body"]
    if kind == "json_invalid":
        return ApiError(400, f"the body must be JSON: {fault['ctx']['error']} at character {place[0]}")
    param = _printable(".".join(str(part) for part in place)) or None
    if kind == "value_error":  # one of our own, which says what it is about
        return of_argument(fault["ctx"]["error"], {}, param)
    if kind == "extra_forbidden":
        return ApiError(400, f"{param} is not supported by this server", param=param, code="unsupported_parameter")
    if kind == "missing":
        return ApiError(400, f"{param or 'the body'} must be given", param=param, code="missing_required_parameter")
    if param is None:
        return ApiError(400, f"the body must be a JSON object, with Content-Type: application/json ({fault['type']})")
    return ApiError(400, f"{param}: {_printable(fault['msg'])}, was {fault['input']!r:.60}", param=param)


def _printable(text: str) -> str:
    """Return text that UTF-8 can hold: JSON may name lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def install(app: FastAPI) -> None:
    """Let ``app`` answer every error with a refusal. One that nobody expected shows nothing; the log has it."""

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error, ApiError):
            return error.response()
        if isinstance(error, HTTPException):
            return ApiError(error.status_code, str(error.detail), headers=error.headers).response()
        if isinstance(error, RequestValidationError):
            return _of_validation(error).response()
        if isinstance(error, EngineBusy | EngineStopped | StepFailed):
            return of_engine(error).response()
        return ApiError(500, "the server failed on this request; its log says why", code="internal_error").response()

    for kind in (HTTPException, RequestValidationError, EngineBusy, EngineStopped, StepFailed, Exception):
        app.add_exception_handler(kind, refuse)
