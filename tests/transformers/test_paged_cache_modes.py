"""PagedCache in every mode of ``generate``: the same tokens as on the stock cache."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests.tiny_models import build, tiny, tiny_config
from tests.transformers.generating import NEW_TOKENS, both, generate, left_padded, paged, prompts

if TYPE_CHECKING:
    from collections.abc import Callable

# Full attention; windows of 5 beside full attention; windows and sink logits.
KINDS = ("llama", "gemma3", "gpt_oss")

PADDED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "parallel samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "prefill in chunks": {"prefill_chunk_size": 5},
    "guidance": {"guidance_scale": 1.5},
    "repetition penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "early end": {"eos_token_id": list(range(40, 60))},
}
ALONE: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "prompt lookup, sampled": {"prompt_lookup_num_tokens": 3, "do_sample": True},
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", PADDED)
def test_padded_batch(name: str, mode: str) -> None:
    """A left-padded batch gives the stock tokens, and the cache gives every page back."""
    expected, got = both(tiny(name), left_padded(), **PADDED[mode])

    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", ALONE)
def test_single_prompt(name: str, mode: str) -> None:
    """A single prompt gives the stock tokens, also in the modes that know no batch."""
    prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])

    expected, got = both(tiny(name), {"input_ids": prompt}, **ALONE[mode])

    assert expected.tolist() == got.tolist()


def test_early_exit() -> None:
    """A model that drafts with its own first layer, on a cache of the library's, gives the stock tokens."""
    # Of its own, since the library leaves the config cut short where it fails; older ones fail at windows.
    expected, got = both(build(tiny_config("llama")), {"input_ids": prompts(1)}, assistant_early_exit=1)

    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("agreement", ["none", "full"])
@pytest.mark.parametrize("sampled", [False, True])
def test_assisted_decoding(name: str, agreement: str, sampled: bool) -> None:
    """Rejected drafts are cropped away, agreeing ones stay; past a window too."""
    model = tiny(name)
    assistant = copy.deepcopy(model) if agreement == "full" else build(tiny_config(name), seed=1)

    expected, got = both(model, {"input_ids": prompts(1)}, assistant_model=assistant, do_sample=sampled)

    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize("name", KINDS)
def test_embeddings_instead_of_ids(name: str) -> None:
    """``inputs_embeds`` give the stock tokens."""
    model, inputs = tiny(name), left_padded()
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))

    expected, got = both(model, {"inputs_embeds": embeds, **inputs})

    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_batch_sizes(num_rows: int) -> None:
    """Batches of 1 to 32 rows give the stock tokens."""
    expected, got = both(tiny("qwen2"), left_padded(num_rows, 9))

    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize("name", ["llama_mqa", "llama_mha", "qwen3", "mistral", "gemma2", "gpt_neox", "phi", "gpt2"])
def test_other_kinds_of_attention(name: str) -> None:
    """Every kind of attention in the table of tiny models gives the stock tokens, on pages alone."""
    model = tiny(name)
    with paged(model) as cache:
        assert {} == cache.learned.gathered

    expected, got = both(model, left_padded())

    assert expected.tolist() == got.tolist()


def test_streamer_criteria_and_processors() -> None:
    """A streamer sees every token; own stopping criteria and logits processors are obeyed."""
    model, inputs = tiny("llama"), {"input_ids": prompts(1)}
    seen: list[list[int]] = []

    class Streamer(BaseStreamer):  # type: ignore[misc]
        def put(self, value: torch.Tensor) -> None:
            seen.append(value.flatten().tolist())

        def end(self) -> None:
            seen.append([-1])

    class AfterSeven(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 21)

    class OnlyEven(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, 1::2] = -torch.inf
            return scores

    options = {
        "stopping_criteria": StoppingCriteriaList([AfterSeven()]),
        "logits_processor": LogitsProcessorList([OnlyEven()]),
    }
    expected = generate(model, inputs, **options)
    with paged(model) as cache:
        got = generate(model, inputs, past_key_values=cache, streamer=Streamer(), **options)

    assert expected.tolist() == got.tolist()
    assert [inputs["input_ids"][0].tolist(), *[[token] for token in got[0, 14:].tolist()], [-1]] == seen
    assert 7 == len(seen) - 2


@pytest.mark.parametrize("name", KINDS)
def test_scores_and_logits(name: str) -> None:
    """Logits in the output are the stock ones but for rounding."""
    expected, got = both(tiny(name), left_padded(), return_dict_in_generate=True, output_logits=True)

    spread = float(expected.logits[0].max() - expected.logits[0].min())
    error = max(float((a - b).abs().max()) for a, b in zip(expected.logits, got.logits, strict=True))
    assert error <= 1e-5 * spread


def test_attention_weights() -> None:
    """Attention weights are asked of the model's own implementation, on gathered K and V, and are the stock ones."""
    model = build(tiny_config("gemma2"))
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_attentions": True}

    expected, got = both(model, left_padded(), **options)

    assert expected.sequences.tolist() == got.sequences.tolist()
    assert NEW_TOKENS == len(got.attentions)
    for theirs, ours in zip(expected.attentions, got.attentions, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            width = min(one.shape[-1], other.shape[-1])  # the stock cache has forgotten what left the window
            torch.testing.assert_close(other[..., -width:], one[..., -width:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_own_implementation(implementation: str) -> None:
    """Whatever implementation the model was loaded with, tokens are the stock ones, and it is named again after."""
    model = build(tiny_config("llama"))
    model.set_attn_implementation(implementation)

    expected, got = both(model, left_padded())

    assert expected.tolist() == got.tolist()
    assert implementation == model.config._attn_implementation


def forward_by_hand(model: Any, cache: Any, keyword: str) -> list[list[int]]:
    """Decode greedily with a loop of one's own, positions and mask left to the model."""
    ids, tokens = prompts(2), []
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=True, **{keyword: cache}).logits
        ids = logits[:, -1:].argmax(-1)
        tokens.append(ids[:, 0].tolist())
    return tokens


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", ["keyword", "base model"])
def test_forward_by_hand(name: str, how: str, stock_cache: Callable[[Any], Any]) -> None:
    """A loop of one's own over ``model(...)``, with no mask and no positions, gives the stock tokens."""
    model = tiny(name)
    keyword = "past_key_values"
    with pytest.MonkeyPatch.context() as patch, paged(model) as cache:
        if how == "base model":  # the head is applied by the caller
            patch.setattr(model, "forward", _through_base(model))
        expected = forward_by_hand(model, stock_cache(model), keyword)

        assert expected == forward_by_hand(model, cache, keyword)


def _through_base(model: Any) -> Any:
    from types import SimpleNamespace

    def forward(**kwargs: Any) -> Any:
        hidden = model.model(**kwargs).last_hidden_state
        return SimpleNamespace(logits=model.lm_head(hidden))

    return forward
