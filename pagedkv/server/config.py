"""What a server may be told: its model's name, its key and its limits. Checked at construction; knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.engine.checks import require_int, require_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The limits of one server.

    Attributes:
        model_name: what clients call the model.
        api_key: what they must send as a bearer token, printable ASCII without spaces; None: nothing.
        max_requests: the most unfinished requests, running and waiting; more get 429.
        max_body_bytes: the longest request body; longer ones get 413.
        body_timeout: seconds that a client has to send its body; slower ones get 408.
        grace: seconds that running answers have to end by themselves after a signal.
    """

    model_name: str
    api_key: str | None = None
    max_requests: int = 256
    max_body_bytes: int = 2**20
    body_timeout: float = 30.0
    grace: float = 30.0

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.model_name, str) or not self.model_name.strip():
            raise ValueError(f"model_name must be a name, was {self.model_name!r}")
        if self.api_key is not None and not (self.api_key and all("!" <= char <= "~" for char in self.api_key)):
            raise ValueError("api_key must be printable ASCII without spaces, at least one character")
        require_int("max_requests", self.max_requests, 1)
        require_int("max_body_bytes", self.max_body_bytes, 1)
        require_number("body_timeout", self.body_timeout, 0)
        require_number("grace", self.grace, 0)
