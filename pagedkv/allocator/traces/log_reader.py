"""Reading an `EventLog` back: what was asked of the allocator, as requests.

Takes the log's lines, gives one request per sequence that was opened or forked, and forgets how the recorded pool
behaved: its evictions and preemptions are the replay's own affair. What was rolled back is not replayed; a fork is a
request whose prompt is what its parent had stored; tokens that no id names are ids that occur nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .event_log import FORMAT, VERSION
from .lines import count_in, counts_in, field_of, json_object, number_in
from .request import OUTPUT_IDS, Ids, Request, Trace, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_MAX_ID = 2**32 - 1


class _Draft:
    """A sequence while its events are read: its prompt and output so far, and how many tokens of both are stored."""

    def __init__(self, prompt: list[int], stored: int, like: _Draft | None = None, **told: Any) -> None:
        self.prompt = prompt
        self.output: list[int] = []
        self.stored = stored
        self.arrival: float = told["at"]
        self.namespace: int | None = like.namespace if like else told.get("namespace")
        self.media: list[tuple[int, int, str | None]] = list(like.media) if like else told.get("media", [])
        self.closed = False

    def truncate(self, length: int) -> None:
        if length > self.stored:
            raise ValueError(f"to must be at most the {self.stored} tokens stored, was {length}")
        self.stored = length
        del self.output[max(length - len(self.prompt), 0) :]
        del self.prompt[length:]
        self.media = [span for span in self.media if span[0] + span[1] <= length]

    def request(self) -> Request:
        return Request(self.arrival, Ids(self.prompt), Ids(self.output), self.namespace, tuple(self.media))


class _Reader:
    """Follows the events of one log."""

    def __init__(self) -> None:
        self.drafts: dict[int, _Draft] = {}
        self.recorded_hits: dict[int, int] = {}
        self._unnamed = OUTPUT_IDS

    def read(self, record: dict[str, Any]) -> None:
        """Take one event."""
        event = field_of(record, "event")
        follow = getattr(self, f"_{event}", None) if event in _EVENTS else None
        if follow is None:
            raise ValueError(f"event must be one of {', '.join(_EVENTS)}, was {str(event)[:40]!r}")
        follow(record)

    def _draft(self, value: Any, name: str = "seq") -> _Draft:
        draft = self.drafts.get(count_in(value, name))
        if draft is None or draft.closed:
            raise ValueError(f"{name} must be an open sequence, was {value}")
        return draft

    def _new(self, record: dict[str, Any]) -> int:
        number = count_in(field_of(record, "seq"), "seq")
        if number in self.drafts:
            raise ValueError(f"seq must be a new number, {number} was opened before")
        return number

    def _open(self, record: dict[str, Any]) -> None:
        number = self._new(record)
        tokens = counts_in(field_of(record, "tokens"), "tokens", most=_MAX_ID)
        cached = count_in(field_of(record, "cached"), "cached", most=max(len(tokens) - 1, 0))
        told: dict[str, Any] = {"at": number_in(field_of(record, "at"), "at")}
        if "namespace" in record:
            told["namespace"] = count_in(record["namespace"], "namespace")
        if "media" in record:
            told["media"] = _media(record["media"], len(tokens))
        self.drafts[number] = _Draft(tokens, cached, **told)
        self.recorded_hits[number] = cached

    def _fork(self, record: dict[str, Any]) -> None:
        number, parent = self._new(record), self._draft(field_of(record, "parent"), "parent")
        at = number_in(field_of(record, "at"), "at")
        self.drafts[number] = _Draft(parent.prompt + parent.output, parent.stored, parent, at=at)

    def _commit(self, record: dict[str, Any]) -> None:
        rows = field_of(record, "rows")
        if not isinstance(rows, list):
            raise ValueError("rows must be a list")
        for row in rows:
            if not isinstance(row, list) or len(row) != 3:
                raise ValueError("rows must hold [seq, prompt tokens, ids that follow]")
            draft = self._draft(row[0])
            inside = count_in(row[1], "prompt tokens", most=max(len(draft.prompt) - draft.stored, 0))
            draft.stored += inside
            if isinstance(row[2], list):
                ids = counts_in(row[2], "ids that follow", most=_MAX_ID)
            else:
                ids = self._new_ids(count_in(row[2], "number of unnamed tokens"))
            if ids and draft.stored != len(draft.prompt) + len(draft.output):
                raise ValueError(f"ids that follow must come after the whole prompt, {draft.stored} tokens are stored")
            draft.output += ids
            draft.stored += len(ids)

    def _new_ids(self, count: int) -> list[int]:
        first, self._unnamed = self._unnamed, self._unnamed + count
        if self._unnamed > _MAX_ID + 1:
            raise ValueError("the log has more unnamed tokens than there are ids")
        return list(range(first, self._unnamed))

    def _truncate(self, record: dict[str, Any]) -> None:
        self._draft(field_of(record, "seq")).truncate(count_in(field_of(record, "to"), "to"))

    def _close(self, record: dict[str, Any]) -> None:
        self._draft(field_of(record, "seq")).closed = True

    def _evict(self, record: dict[str, Any]) -> None:
        count_in(field_of(record, "count"), "count")

    def _reset(self, record: dict[str, Any]) -> None:
        pass

    # What was held besides sequences is not replayed; it must be well formed all the same.

    def _pin(self, record: dict[str, Any]) -> None:
        count_in(field_of(record, "pin"), "pin")
        count_in(field_of(record, "tokens"), "tokens")

    def _unpin(self, record: dict[str, Any]) -> None:
        count_in(field_of(record, "pin"), "pin")

    def _step(self, record: dict[str, Any]) -> None:
        count_in(field_of(record, "step"), "step")

    def _step_end(self, record: dict[str, Any]) -> None:
        count_in(field_of(record, "step"), "step")

    def _swap(self, record: dict[str, Any]) -> None:
        self._draft(field_of(record, "seq"))
        if field_of(record, "to") not in {"host", "device"}:
            raise ValueError(f"to must be 'host' or 'device', was {str(record['to'])[:40]!r}")


_EVENTS = (
    "open", "commit", "fork", "truncate", "close", "evict", "reset", "pin", "unpin", "step", "step_end", "swap",
)  # fmt: skip


def _media(spans: Any, length: int) -> list[tuple[int, int, str | None]]:
    if not isinstance(spans, list):
        raise ValueError("media must be a list")
    found = []
    for span in spans:
        if not isinstance(span, list) or len(span) != 3:
            raise ValueError("media must hold [start, length, digest]")
        start = count_in(span[0], "media start")
        size = count_in(span[1], "media length", least=1)
        if start + size > length:
            raise ValueError(f"media must lie within the {length} tokens, was {start} + {size}")
        found.append((start, size, None if span[2] is None else str(count_in(span[2], "media digest"))))
    return found


def read_log(path: Path, lines: Iterable[tuple[int, str]], limit: int | None) -> Trace:
    """Return the trace; see `read_trace`. Sequences without a token are left out."""
    reader = _Reader()
    for number, text in lines:
        try:
            record = json_object(text)
            if number > 1:
                reader.read(record)
            elif record[FORMAT] != VERSION:
                raise ValueError(f"{FORMAT} must be {VERSION}, the version read here, was {str(record[FORMAT])[:40]}")
        except ValueError as error:
            raise TraceError(path, number, str(error)) from error
    kept = {number: draft for number, draft in reader.drafts.items() if draft.prompt or draft.output}
    kept = dict(list(kept.items())[:limit])
    requests = [draft.request() for draft in kept.values()]
    hits = sum(reader.recorded_hits.get(number, 0) for number in kept)
    return Trace(str(path), "pagedkv", requests, hits_known=True, outputs_known=True, recorded_hit_tokens=hits)
