"""The table of models: one architecture of each kind here, every architecture in slow tests."""

from __future__ import annotations

import json
import re

import pytest
import transformers

from tests.tiny_models import require_known
from tests.transformers import tiny_zoo
from tests.transformers.coverage import DOCS, EQUAL, REFUSED, WRONG, markdown, row_of, rows, summary

# Model type: (with PagedCache, in the engine, a reason that the row names).
KINDS = {
    "mistral": (EQUAL, EQUAL, ""),  # every layer slides
    "gemma2": (EQUAL, EQUAL, ""),  # softcap, every other layer slides
    "gemma3_text": (EQUAL, EQUAL, ""),
    "gpt_oss": (EQUAL, EQUAL, ""),  # sink logits
    "qwen3": (EQUAL, EQUAL, ""),  # a head_dim of its own
    "phi": (EQUAL, EQUAL, ""),  # partial rotary
    "gpt_bigcode": (EQUAL, EQUAL, ""),  # one KV head
    "mixtral": (EQUAL, EQUAL, ""),  # experts
    "gemma3n_text": (EQUAL, EQUAL, ""),  # layers that share KV
    "gemma4_text": (EQUAL, EQUAL, ""),  # the same, with two widths
    "llama4_text": (EQUAL, EQUAL, ""),  # chunks
    "deepseek_v3": (EQUAL, EQUAL, ""),  # latents
    "roberta": (EQUAL, EQUAL, ""),  # an encoder's architecture as a decoder
    "bloom": (EQUAL, REFUSED, "must take 'position_ids'"),  # ALiBi
    "qwen3_next": (EQUAL, REFUSED, "recurrent state"),
    "bart": (EQUAL, REFUSED, "must take 'position_ids'"),
    "gpt_neo": (EQUAL, REFUSED, "past the attention interface"),
    "prophetnet": (EQUAL, REFUSED, "cross attention"),  # reads padding
    "moshi": (REFUSED, REFUSED, "without the window"),  # forgets what its mask still shows
    "mamba": (REFUSED, REFUSED, "recurrent state"),
}


@pytest.mark.parametrize("model_type", KINDS)
def test_one_of_each_kind(model_type: str) -> None:
    """Each kind of attention is equal to the stock cache, or refused with the reason."""
    require_known(model_type)
    (architecture,) = (one for one in tiny_zoo.architectures() if one.model_type == model_type)
    cache, engine, reason = KINDS[model_type]
    row = row_of(architecture)

    assert (cache, engine) == (row.cache, row.engine), row.reason
    assert reason in row.reason
    assert (REFUSED in {cache, engine}) == bool(row.reason)


def test_the_committed_table_has_nothing_wrong_and_reaches_the_bar() -> None:
    """159 architectures on the attention interface are equal with `PagedCache`, 116 in the engine, none is wrong."""
    found = json.loads((DOCS / "models.json").read_text(encoding="utf-8"))
    assert set() == {row["architecture"] for row in found if WRONG in {row["cache"], row["engine"]}}
    on_interface = [row for row in found if row["attention_interface"]]
    assert sum(row["cache"] == EQUAL for row in on_interface) >= 159
    assert sum(row["engine"] == EQUAL for row in on_interface) >= 116
    assert [] == [row for row in found if REFUSED in {row["cache"], row["engine"]} and not row["reason"]]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_committed_table_is_what_a_fresh_run_gives() -> None:
    """Every architecture, run again: docs/models.json and docs/models.md say what happens, and nothing is wrong.

    On another transformers than the table's only the last is asked.
    """
    found, not_tried = rows()
    assert [] == [row for row in found if WRONG in {row.cache, row.engine}]
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    version = re.search(r"transformers (\d+\.\d+\.\d+)", text)
    assert version is not None
    if version.group(1) == transformers.__version__:
        assert json.loads((DOCS / "models.json").read_text(encoding="utf-8")) == [row._asdict() for row in found]
        assert text == markdown(found, not_tried)


def test_sums_count_what_the_rows_say() -> None:
    """The summary has one line for each way of attending, and counts equal and wrong rows in it."""
    (architecture,) = (one for one in tiny_zoo.architectures() if one.model_type == "llama")
    row = row_of(architecture)
    found = [row, row._replace(engine=WRONG), row._replace(attention_interface=False, engine=REFUSED, reason="x")]
    (_, *used), (_, *past) = summary(found)

    assert [2, 2, 1, 1] == used
    assert [1, 1, 0, 0] == past
    assert "| LlamaForCausalLM | llama | no | equal | refused | x |" in markdown(found, {"big": "too big"})
