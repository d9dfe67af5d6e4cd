"""PagedCache where a model is not in one piece: layers on several devices, heads on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv.transformers.build import make_store
from pagedkv.transformers.learned import Learned, StoredLayer
from tests.house.source_tree import ROOT
from tests.tiny_models import tiny
from tests.transformers.generating import generate, left_padded

if TYPE_CHECKING:
    from pathlib import Path


def test_pages_are_on_each_layers_device() -> None:
    """A layer's pages are where its K and V were when the model was tried out."""
    model = tiny("llama")
    layers = {
        index: StoredLayer((2, 8), (2, 8), torch.float32, torch.device(device))
        for index, device in enumerate(("cpu", "meta"))
    }
    store = make_store(model, Learned("Llama", layers, []), num_pages=8, page_size=4)

    assert ["cpu", "meta"] == [pages.device.type for pages in store.k_pages]
    assert "cpu" == store.device.type


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensor_parallel(tmp_path: Path) -> None:
    """Two ranks give the tokens of one, each with half the KV heads, and take the same allocator decisions."""
    model = tiny("qwen3")
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests/transformers/tp_worker.py"), str(tmp_path / "model"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert 0 == run.returncode, run.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]

    assert ranks[0] == ranks[1]
    assert 1 == ranks[0]["kv_heads"]
    assert generate(model, left_padded()).tolist() == ranks[0]["greedy"]
    assert generate(model, left_padded(), num_beams=3).tolist() == ranks[0]["beams"]
