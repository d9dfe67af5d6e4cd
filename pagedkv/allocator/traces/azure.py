"""The Azure LLM inference trace: a CSV of lengths.

Takes lines ``TIMESTAMP,ContextTokens,GeneratedTokens``, gives requests, and cannot know which prompts begin alike:
every request is distinct. Source: Azure/AzurePublicDataset; Patel et al., "Splitwise", ISCA 2024.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from .lines import count_in
from .request import OUTPUT_IDS, NewIds, Request, Trace, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path, lines: Iterable[tuple[int, str]], limit: int | None) -> Trace:
    """Return the trace; see `read_trace`."""
    prompts, outputs = NewIds(0, OUTPUT_IDS), NewIds(OUTPUT_IDS, 2 * OUTPUT_IDS)
    requests: list[Request] = []
    began: datetime | None = None
    for number, text in lines:
        if number == 1:
            if tuple(text.split(",")) != HEADER:
                raise TraceError(path, 1, f"the header must be {','.join(HEADER)}, was {text[:80]!r}")
            continue
        if len(requests) == limit:
            break
        try:
            cells = text.split(",")
            if len(cells) != len(HEADER):
                raise ValueError(f"must have {len(HEADER)} fields, had {len(cells)}")
            moment = _moment(cells[0])
            began = began or moment
            prompt = prompts.take(count_in(cells[1], HEADER[1], least=1))
            output = outputs.take(count_in(cells[2], HEADER[2]))
            requests.append(Request((moment - began).total_seconds(), prompt, output))
        except (ValueError, TypeError) as error:
            raise TraceError(path, number, str(error)) from error
    return Trace(str(path), "azure", requests, hits_known=False, outputs_known=False)


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{HEADER[0]} must be a date and time, was {text[:60]!r}") from error
