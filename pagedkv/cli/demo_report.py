"""What the demo says at the end: one table, one verdict on the tokens, one JSON object.

Takes what the subjects made of the prompts; gives text; refuses to run anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from pagedkv.cli.demo_view import mebibytes
from pagedkv.engine.equality import all_token_equal

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkv.cli.subjects import Served
    from pagedkv.engine.equality import TokenComparison

TITLES = {
    "pagedkv": "pagedkv (paged)",
    "concat": "engine on torch.cat",
    "generate": "model.generate",
}


@dataclass(frozen=True)
class DemoReport:
    """The demo's results: the paged run, what it is compared with, and the comparison of tokens with ``generate``."""

    paged: Served
    concat: Served
    generate: Served
    comparisons: list[TokenComparison]
    prompt_tokens: int

    @property
    def tokens_equal(self) -> bool:
        """Whether all answers are token-equal to ``model.generate``'s."""
        return all_token_equal(self.comparisons)

    @property
    def ties(self) -> int:
        """Answers that part from ``model.generate``'s at a tie."""
        return sum(comparison.tie for comparison in self.comparisons)

    @property
    def passed(self) -> bool:
        """Whether the answers are right and every page came back."""
        return self.tokens_equal and self.paged.in_use_after == 0

    def as_json(self) -> str:
        """Return one line of JSON: rates in tokens per second, memory in bytes at the step that holds most."""
        peak = self.paged.memory.peak
        return json.dumps(
            {
                "tokens_equal": self.tokens_equal,
                "ties": self.ties,
                "requests": len(self.paged.tokens),
                "preemptions": self.paged.preemptions,
                "tokens_per_second": self.paged.tokens_per_second,
                "concat_tokens_per_second": self.concat.tokens_per_second,
                "generate_tokens_per_second": self.generate.tokens_per_second,
                "kv_bytes_used": peak.bytes_used,
                "kv_bytes_held": peak.bytes_held,
                "waste": self.paged.memory.waste,
                "prefix_tokens_reused": self.paged.prefix_tokens_reused,
                "pages_in_use_after": self.paged.in_use_after,
            }
        )

    def show(self, console: Console) -> None:
        """Print the table and the verdict."""
        console.print()
        console.print(self._table())
        peak, held_by_others = self.paged.memory.peak, self.generate.memory.peak.bytes_held
        reused = self.paged.prefix_tokens_reused
        lines = [
            f"{reused:,} of {self.prompt_tokens:,} prompt tokens were found in other chats' pages, not computed again.",
            f"At the fullest step {peak.in_use:,} pages were in use; {self.paged.in_use_after} are now.",
        ]
        if peak.bytes_held:
            lines.append(f"model.generate held {held_by_others / peak.bytes_held:.1f} times the KV memory.")
        if self.paged.preemptions:
            lines.append(f"{self.paged.preemptions} requests were preempted and computed again.")
        console.print("\n".join(lines), highlight=False)
        console.print(self._verdict())

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        table.add_column("")
        for name in ("tokens/s", "seconds", "KV used", "KV held", "waste"):
            table.add_column(name, justify="right", no_wrap=True)
        for served in (self.paged, self.concat, self.generate):
            peak = served.memory.peak
            table.add_row(
                TITLES[served.subject],
                f"{served.tokens_per_second:,.1f}",
                f"{served.seconds:,.1f}",
                mebibytes(peak.bytes_used),
                mebibytes(peak.bytes_held),
                f"{100 * served.memory.waste:.1f} %",
                style="bold green" if served is self.paged else None,
            )
        return table

    def _verdict(self) -> Text:
        compared = sum(comparison.num_tokens for comparison in self.comparisons)
        ties = f" ({self.ties} tied: the two best logits are less than 0.0002 apart)" if self.ties else ""
        if self.tokens_equal:
            answers = f"All {len(self.comparisons)} answers are token-equal to model.generate's"
            verdict = Text(f"✓ {answers}: {compared:,} tokens{ties}.", style="bold green")
        else:
            wrong = [str(index + 1) for index, c in enumerate(self.comparisons) if not c.equal]
            which = f"answers {', '.join(wrong)} differ" if wrong else "there are too many ties to be chance"
            verdict = Text(f"✗ Not token-equal to model.generate: {which}{ties}.", style="bold red")
        if self.paged.in_use_after:
            verdict.append(f"\n✗ {self.paged.in_use_after} pages did not come back.", style="bold red")
        return verdict
