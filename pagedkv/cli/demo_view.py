"""What the demo shows while it runs: a live panel with progress, KV memory and the answers being written.

Takes steps, gives a picture; refuses to measure. On a terminal the panel is redrawn in place a few times a second, and
each finished answer moves up above it; elsewhere (a file, a pipe) the finished answers are all there is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Self

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagedkv.cli.subjects import request_index

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rich.console import Console, RenderableType

    from pagedkv.backend import CacheUsage
    from pagedkv.engine.outputs import StepOutput

REDRAW_SECONDS: Final = 0.12
BAR_WIDTH: Final = 24
INDENT: Final = 4  # columns
NARROW: Final = 100  # columns
LINES_BESIDE_ANSWERS: Final = 6


def mebibytes(num_bytes: float) -> str:
    """Return bytes as people read them beside each other: in MiB, one decimal."""
    return f"{num_bytes / 2**20:,.1f} MiB"


class ProgressView:
    """A `Watcher` that shows one subject at work; use it as a context manager.

    Args:
        console: where to draw.
        title: the subject, in a few words.
        num_tokens: the most output tokens there can be: the bar's end.
        questions: by request id, to stand beside the answers; empty to show progress alone.
    """

    def __init__(self, console: Console, title: str, num_tokens: int, questions: Sequence[str] = ()) -> None:
        self.console = console
        self.title = title
        self.questions = questions
        self._num_tokens = num_tokens
        self._made = 0
        self._answers: dict[int, str] = {}
        self._usage: CacheUsage | None = None
        self._started = self._drawn = time.perf_counter()
        self._live = Live(self._panel(), console=console, auto_refresh=False, transient=True) if self._draws else None

    @property
    def _draws(self) -> bool:
        return self.console.is_terminal

    def __enter__(self) -> Self:
        """Start drawing."""
        self._started = self._drawn = time.perf_counter()
        if self._live is not None:
            self._live.start()
        else:
            self.console.print(Text(f"{self.title} …", style="bold"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the panel away; finished answers stay."""
        if self._live is not None:
            self._live.stop()

    def step(self, num_tokens: int, outputs: Sequence[StepOutput], usage: CacheUsage | None) -> None:
        """Take in one step, and redraw if the last picture is old enough."""
        self._made += num_tokens
        self._usage = usage
        for output in outputs:
            index = request_index(output)
            self._answers[index] = self._answers.get(index, "") + output.text
            if output.finished and self.questions:
                cut = output.finish_reason == "length"
                self.console.print(_finished(self.console, index, self.questions[index], self._answers.pop(index), cut))
        now = time.perf_counter()
        if self._live is not None and now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._live.update(self._panel(), refresh=True)

    def _panel(self) -> RenderableType:
        return Group(self._progress(), *([self._running()] if self.questions else []))

    def _progress(self) -> RenderableType:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        line = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [
            Text(self.title, style="bold"),
            ProgressBar(total=self._num_tokens, completed=self._made, width=BAR_WIDTH),
            Text(f"{self._made:,} tokens, {self._made / seconds:,.0f}/s"),
        ]
        if self._usage is not None and self.console.width >= NARROW:
            held, used = mebibytes(self._usage.bytes_held), mebibytes(self._usage.bytes_used)
            cells.append(Text(f"KV {used} in {held} held", style="cyan"))
        line.add_row(*cells)
        return line

    def _running(self) -> RenderableType:
        """Return the newest words of the answers being written, as many as the terminal is high."""
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(justify="right", style="dim", width=3)
        table.add_column(ratio=1, no_wrap=True, style="cyan")
        table.add_column(ratio=2, no_wrap=True)
        room = self.console.width * 2 // 3 - 6
        for index in sorted(self._answers)[: max(1, self.console.height - LINES_BESIDE_ANSWERS)]:
            words = " ".join(self._answers[index].split())
            tail = words if len(words) <= room else "…" + words[1 - room :]
            table.add_row(str(index + 1), Text(self.questions[index], overflow="ellipsis"), Text(tail))
        return table


def _finished(console: Console, index: int, question: str, answer: str, cut: bool) -> RenderableType:
    """Return a question and its answer, set in; ``cut`` marks an answer that was not at its end."""
    text = Text(" ".join(answer.split()))
    if cut:
        text.append(" …", style="dim")
    head = Text.assemble((f"{index + 1:>2}  ", "dim"), (question, "bold cyan"))
    lines = text.wrap(console, console.width - INDENT)
    for line in lines:
        line.rstrip()
        line.pad_left(INDENT)
    return Group(head, *lines)
