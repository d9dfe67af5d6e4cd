"""When does reading a shared beginning once pay? The estimate that decides it, over batch and shared length.

No GPU and no kernel runs: bytes, launches and occupancy are counted as `pagedkv.attention.shared_prefix` counts them,
so these figures show the rule, not a measurement. The rule's peer is the simplest one, which others used and gave up:
cascade whenever the whole batch shares a page.
"""

from __future__ import annotations

from benchmarks import harness
from pagedkv.attention.shared_prefix import H200, Group, seconds

BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (128, 512, 2048, 8192, 32768)
KV_HEADS, Q_HEADS, DIM = 8, 32, 128


def speedup(rows: int, length: int) -> float:
    """Return how many times less one layer's shared reading takes when it is done once (32/8 heads of 128, bf16)."""
    by_row, once = seconds(
        [Group(tuple(range(rows)), length)], 2 * KV_HEADS * 2 * DIM, 4 * Q_HEADS * (DIM + 1), KV_HEADS, H200
    )
    return by_row / once


def main() -> None:
    """Print the table of ratios; above 1 the cascade is taken."""
    parser = harness.arguments(__doc__ or "")
    options = parser.parse_args()
    report = harness.Report("time row by row / time once for all, estimated: over 1 is taken")
    for rows in BATCHES:
        for length in LENGTHS:
            report.add(f"{rows} rows", f"{length} tokens", speedup(rows, length), "x")
    harness.finish(report, options.json)


if __name__ == "__main__":
    main()
