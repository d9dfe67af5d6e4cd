"""The worked example of the memory specification runs, and its bytes are where it says."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "memory-layout.md"


def test_every_code_block_runs_in_order() -> None:
    """The python blocks of docs/memory-layout.md run as one program; their assertions hold."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    program = "\n".join(blocks)

    assert len(blocks) == 7
    exec(compile(program, str(DOCUMENT), "exec"), {})
