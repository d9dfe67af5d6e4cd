"""A real model with sliding windows: Gemma 3 270M, 15 layers that see 512 tokens and 3 that see all."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedkv.engine.equality import all_token_equal, compare_tokens
from pagedkv.transformers import PagedCache
from tests.transformers.gemma3_270m import gemma3_270m

PROMPT_TOKENS = 4000
NEW_TOKENS = 16
PAGE_SIZE = 16


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_prompt_decodes_as_with_the_stock_cache_and_holds_far_fewer_pages() -> None:
    """4,000 tokens of prompt decode token for token as with the stock cache; the windows gave their pages back.

    Prefilled in chunks, the text holds under a third of the page memory that full attention in every layer would take.
    """
    model = AutoModelForCausalLM.from_pretrained(gemma3_270m(), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(100, 20_000, (1, PROMPT_TOKENS), generator=generator)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, "prefill_chunk_size": 512}
    expected = model.generate(prompt, **options)[0, PROMPT_TOKENS:].tolist()
    with PagedCache(model, memory="1GiB", page_size=PAGE_SIZE) as cache:
        tokens = model.generate(prompt, past_key_values=cache, **options)[0, PROMPT_TOKENS:].tolist()
        held = cache.usage().bytes_held

    def logits_at(index: int) -> torch.Tensor:
        text = torch.cat([prompt, torch.tensor([expected[:index]], dtype=torch.int64)], dim=1)
        with torch.inference_mode():
            logits: torch.Tensor = model(text, logits_to_keep=1).logits[0, -1].float()
        return logits

    assert NEW_TOKENS == len(tokens)
    assert all_token_equal([compare_tokens(tokens, expected, logits_at)])
    config = model.config.get_text_config()
    token_bytes = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4
    assert held < token_bytes * (PROMPT_TOKENS + NEW_TOKENS) / 3
