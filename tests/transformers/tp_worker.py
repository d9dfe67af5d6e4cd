"""One rank of a tensor-parallel run: loads a folder's model by transformers' own plan and generates on a PagedCache.

    torchrun --nproc-per-node 2 tests/transformers/tp_worker.py FOLDER OUT

Writes ``OUT/rank<r>.json``: tokens by mode, the KV heads that this rank's pages hold, and every page id that the
allocator handed out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pagedkv import PagedCache
from tests.transformers.generating import generate, left_padded


def load(folder: str) -> Any:
    """Return the model, split over the ranks."""
    try:
        from transformers.distributed import DistributedConfig

        options: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):
        options = {"tp_plan": "auto"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def main(folder: str, out: str) -> None:
    """Generate in two modes and write down what happened."""
    dist.init_process_group("gloo")
    model = load(folder)
    cache, result = PagedCache(model, num_pages=200, page_size=4, check=True), {}
    tables = []
    for name, options in (("greedy", {}), ("beams", {"num_beams": 3})):
        result[name] = generate(model, left_padded(), past_key_values=cache, **options).tolist()
        tables.append(cache.store.allocator.block_tables(0).tolist())
        cache.reset()
    result |= {"kv_heads": cache.store.k_pages[0].shape[1], "tables": tables}
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
