"""The event log: what an observer writes is what the allocator was asked, and is read back as requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.allocator.namespace import Media
from pagedkv.allocator.traces import EventLog, Observer, TraceError, read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from pagedkv.allocator.traces import Trace

HEADER = '{"pagedkv_events":1,"num_pages":8,"page_size":4}'
OPEN = '{"event":"open","seq":1,"at":1,"cached":0,"tokens":[5,6,7]}'


def ids(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return token ids as an observer gets them."""
    return np.array(tokens, np.uint32)


def opened(log: Observer, sequence: int, *tokens: int, cached: int = 0, space: object = None) -> None:
    """Tell the log that a sequence was opened."""
    log.opened(sequence, ids(*tokens), cached, namespace=space, media=(), at=0.0)


def texts(trace: Trace) -> list[tuple[list[int], list[int]]]:
    """Return the prompts and outputs."""
    return [(r.prompt.array().tolist(), r.output.array().tolist()) for r in trace.requests]


def test_a_log_gives_the_prompts_and_outputs_back(tmp_path: Path) -> None:
    """What was opened is the prompt, what was committed after it the output, whatever the steps were."""
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.attached(100, 4)
        opened(log, 1, 10, 11, 12, 13, 14)
        log.reserved([1], [5])
        log.committed([1], [ids(10, 11, 12, 13)], [4])
        opened(log, 2, 10, 11, 12, 13, 20, cached=4)
        log.committed([1, 2], [ids(14, 30), ids(20)], [2, 1])
        log.committed([1, 2], [ids(31), ids(40)], [1, 1])
        log.evicted([3, 4])
        log.closed(1)
        log.was_reset()
        log.closed(2)
    trace = read_trace(path)

    assert [([10, 11, 12, 13, 14], [30, 31]), ([10, 11, 12, 13, 20], [40])] == texts(trace)
    assert ("pagedkv", True, True, 4) == (
        trace.kind,
        trace.hits_known,
        trace.outputs_known,
        trace.recorded_hit_tokens,
    )


def test_prompt_tokens_are_written_once(tmp_path: Path) -> None:
    """Committing the prompt writes its length, not its ids again."""
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.attached(100, 4)
        opened(log, 1, *range(1000, 1999))
        log.committed([1], [ids(*range(1000, 1999))], [999])
    last = path.read_text(encoding="utf-8").splitlines()[-1]

    assert {"event": "commit", "rows": [[1, 999, []]]} == json.loads(last)


def test_a_fork_is_a_request_on_what_its_parent_had_stored(tmp_path: Path) -> None:
    """A fork's prompt is the parent's text so far, its output its own; its parent's is not changed by it."""
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.attached(100, 4)
        opened(log, 1, 1, 2, 3)
        log.committed([1], [ids(1, 2, 3, 4)], [4])
        log.forked(1, 2, 7.0)
        log.committed([1, 2], [ids(5), ids(6)], [1, 1])

    assert [([1, 2, 3], [4, 5]), ([1, 2, 3, 4], [6])] == texts(read_trace(path))


def test_what_was_rolled_back_is_not_replayed(tmp_path: Path) -> None:
    """After a truncation the text goes on from there; cut prompt tokens are gone too."""
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.attached(100, 4)
        opened(log, 1, 1, 2, 3)
        log.committed([1], [ids(1, 2, 3, 4, 5)], [5])
        log.truncated(1, 4)
        log.committed([1], [ids(8)], [1])
        opened(log, 2, 1, 2, 3)
        log.committed([2], [ids(1, 2, 3)], [3])
        log.truncated(2, 2)
        log.committed([2], [ids(9)], [1])

    assert [([1, 2, 3], [4, 8]), ([1, 2], [9])] == texts(read_trace(path))


def test_tokens_without_ids_are_like_no_others(tmp_path: Path) -> None:
    """``commit(count=…)`` past the prompt is read as ids that occur nowhere else."""
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.attached(100, 4)
        opened(log, 1, 1)
        opened(log, 2, 1)
        log.committed([1, 2], [None, None], [3, 3])
    (_, first), (_, second) = texts(read_trace(path))

    assert 4 == len({*first, *second})
    assert not {1} & {*first, *second}


def test_namespaces_and_media_keep_their_sameness(tmp_path: Path) -> None:
    """Namespaces and digests become numbers: equal stay equal, 1 and True stay apart, None stays None."""
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.attached(100, 4)
        for number, space in enumerate(["a", 1, True, "a", None], 1):
            opened(log, number, 1, 2, space=space)
        for number, digest in enumerate(["x", b"x", "x", None], 6):
            log.opened(number, ids(1, 2, 3), 0, namespace=None, media=(Media(1, 2, digest),), at=0.0)
    requests = read_trace(path).requests

    assert [1, 2, 3, 1, None] == [request.namespace for request in requests[:5]]
    assert [((1, 2, "1"),), ((1, 2, "2"),), ((1, 2, "1"),), ((1, 2, None),)] == [r.media for r in requests[5:]]


def test_a_log_takes_one_allocator(tmp_path: Path) -> None:
    """Two allocators in one log would mix their sequences' numbers."""
    with EventLog(tmp_path / "log") as log:
        log.attached(8, 4)
        with pytest.raises(ValueError, match="one allocator"):
            log.attached(8, 4)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (OPEN[:-3], "cut off"),
        ('{"event":"explode"}', "event must be one of"),
        ('{"event":"__init__"}', "event must be one of"),
        ('{"event":["open"]}', "event must be one of"),
        ("{}", "'event' is missing"),
        (OPEN, "1 was opened before"),
        (OPEN.replace('"seq":1', '"seq":2').replace("[5,6,7]", "[5,-6]"), "tokens"),
        (OPEN.replace('"seq":1', '"seq":2').replace("[5,6,7]", "[4294967296]"), "tokens"),
        (OPEN.replace('"seq":1', '"seq":2').replace('"cached":0', '"cached":3'), "cached"),
        (OPEN.replace('"seq":1', '"seq":2').replace('"at":1', '"at":"now"'), "at must be a number"),
        (OPEN.replace('"seq":1', '"seq":2,"media":[[2,5,1]]'), "media must lie within the 3 tokens"),
        (OPEN.replace('"seq":1', '"seq":2,"media":[[0,0,1]]'), "media length"),
        (OPEN.replace('"seq":1', '"seq":2,"namespace":"a"'), "namespace"),
        ('{"event":"commit","rows":[[2,0,[1]]]}', "seq must be an open sequence, was 2"),
        ('{"event":"commit","rows":[[1,0,[1]]]}', "after the whole prompt, 0 tokens are stored"),
        ('{"event":"commit","rows":[[1,4,[]]]}', "prompt tokens"),
        ('{"event":"commit","rows":[[1,3]]}', "rows must hold"),
        ('{"event":"commit","rows":{}}', "rows must be a list"),
        ('{"event":"commit","rows":[[1,3,[true]]]}', "ids that follow"),
        ('{"event":"commit","rows":[[1,3,2147483649]]}', "unnamed tokens"),
        ('{"event":"truncate","seq":1,"to":1}', "to must be at most the 0 tokens stored"),
        ('{"event":"fork","seq":1,"parent":1,"at":0}', "opened before"),
        ('{"event":"fork","seq":3,"parent":2,"at":0}', "parent must be an open sequence"),
        ('{"event":"close","seq":2}', "open sequence"),
        ('{"event":"evict","count":-1}', "count"),
    ],
)
def test_a_malformed_event_is_named(tmp_path: Path, line: str, words: str) -> None:
    """An event that is cut off, unknown or contradicts what came before is an error with file and line."""
    path = tmp_path / "log"
    path.write_text("\n".join([HEADER, OPEN, line, ""]), encoding="utf-8")

    with pytest.raises(TraceError, match=words) as caught:
        read_trace(path)
    assert 3 == caught.value.line


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    """A version that this reader does not know is refused at the first line."""
    path = tmp_path / "log"
    path.write_text(HEADER.replace('events":1', 'events":2') + "\n" + OPEN + "\n", encoding="utf-8")

    with pytest.raises(TraceError, match="pagedkv_events must be 1") as caught:
        read_trace(path)
    assert 1 == caught.value.line


@settings(max_examples=60)
@given(data=st.data())
def test_any_history_is_read_back_as_its_texts(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever was opened, committed, forked, truncated and closed: the requests' texts are the sequences' texts."""
    path = tmp_path_factory.mktemp("log") / "log"
    model: dict[int, list[int]] = {}
    prompts: dict[int, int] = {}
    given_text: dict[int, list[int]] = {}
    live: list[int] = []
    with EventLog(path) as log:
        log.attached(100, 4)
        for step in range(data.draw(st.integers(1, 12))):
            verb = data.draw(st.sampled_from(["open", "commit", "fork", "truncate", "close"] if live else ["open"]))
            number = data.draw(st.sampled_from(live)) if live else 0
            new = len(model) + 1
            if verb == "open":
                given_text[new] = data.draw(st.lists(st.integers(0, 9), max_size=6))
                prompts[new] = len(given_text[new])
                cached = data.draw(st.integers(0, max(prompts[new] - 1, 0)))
                model[new] = given_text[new][:cached]
                opened(log, new, *given_text[new], cached=cached)
                live.append(new)
            elif verb == "fork":
                log.forked(number, new, float(step))
                model[new], prompts[new] = list(model[number]), prompts[number]
                given_text[new] = given_text[number]
                live.append(new)
            elif verb == "commit":
                inside = given_text[number][len(model[number]) : prompts[number]]
                more = (inside + data.draw(st.lists(st.integers(10, 99), max_size=4)))[: data.draw(st.integers(0, 8))]
                model[number] += more
                log.committed([number], [ids(*more)], [len(more)])
            elif verb == "truncate":
                length = data.draw(st.integers(0, len(model[number])))
                del model[number][length:]
                prompts[number] = min(prompts[number], length)
                log.truncated(number, length)
            else:
                log.closed(number)
                live.remove(number)
    expected = [model[n] + given_text[n][len(model[n]) : prompts[n]] for n in model]
    expected = [text for text in expected if text]

    if expected:
        assert expected == [prompt + output for prompt, output in texts(read_trace(path))]
    else:
        with pytest.raises(TraceError, match="no request"):
            read_trace(path)
