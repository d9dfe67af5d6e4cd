"""What every architecture of the installed transformers does with us: the table in docs/models.md and docs/models.json.

    python -m tests.transformers.coverage            write both files
    python -m tests.transformers.coverage llama …    print the rows of some model types

Each architecture is built tiny (`tests.transformers.tiny_zoo`) and run twice, with `PagedCache` in `generate` and in
ragged steps of the engine, against the model's own eager attention on the stock cache. A result is *equal* (same
tokens, logits within 2e-3 of their spread), *refused* (by an error that says why), or *wrong*. Two kinds of experts'
scores can be equal to the last bit, and then a sum in another order chooses another expert: what differs is tried
again with other weights, and a fault shows with those too.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from transformers.masking_utils import eager_mask

from pagedkv.cache import PagedKVCache
from pagedkv.spec import UnsupportedModel
from pagedkv.transformers import ModelRunner, PagedCache, observe_kv_spec
from pagedkv.transformers.hook import implementation
from tests.engine.ragged import run_schedule
from tests.tiny_models import stock_logits
from tests.transformers import tiny_zoo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.transformers.tiny_zoo import Architecture

DOCS = Path(__file__).parents[2] / "docs"
LENGTHS = (9, 14)
NEW_TOKENS = 12
TOLERANCE = 2e-3
PAGE_SIZE = 4
NUM_PAGES = 256
SEEDS = (0, 1)
SPY = "coverage_spy"

EQUAL, REFUSED, WRONG = "equal", "refused", "wrong"


class Row(NamedTuple):
    """One architecture's results; ``reason`` says why something is not equal."""

    architecture: str
    model_type: str
    attention_interface: bool
    cache: str
    engine: str
    reason: str


def rows(architectures: Iterable[Architecture] | None = None) -> tuple[list[Row], dict[str, str]]:
    """Return a row for each architecture that can be made tiny, and why the others, by model type, cannot."""
    found, not_tried = [], {}
    for architecture in tiny_zoo.architectures() if architectures is None else architectures:
        try:
            found.append(row_of(architecture))
        except tiny_zoo.CannotBeTiny as error:
            not_tried[architecture.model_type] = _one_line(error)
    return found, not_tried


def row_of(architecture: Architecture) -> Row:
    """Build the architecture and return what it does.

    Raises:
        CannotBeTiny: if it cannot be built, or its own forward fails on bare tokens.
    """
    results = []
    for seed in SEEDS:
        model = tiny_zoo.build(architecture, seed=seed)
        results.append((_judge(cache_result, model), _judge(engine_result, model)))
        if WRONG not in {verdict for verdict, _ in results[-1]}:
            break
    (cache, cache_reason), (engine, engine_reason) = results[-1]
    reasons = [f"cache: {cache_reason}"] * bool(cache_reason) + [f"engine: {engine_reason}"] * bool(engine_reason)
    return Row(
        architecture.model_class.__name__,
        architecture.model_type,
        uses_interface(model),
        cache,
        engine,
        "; ".join(reasons),
    )


def _judge(run: Any, model: Any) -> tuple[str, str]:
    """Return the verdict of ``run`` and its reason; an error counts as a refusal only where it says that it is one."""
    try:
        error = run(model)
    except UnsupportedModel as refusal:
        return REFUSED, _one_line(refusal)
    except Exception as fault:
        return WRONG, f"{type(fault).__name__}: {_one_line(fault)}"
    return (EQUAL, "") if error <= TOLERANCE else (WRONG, f"logits differ by {error:.2g} of their spread")


def cache_result(model: Any) -> float:
    """Return the largest difference of logits between `PagedCache` and the stock cache, in spreads; inf for tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, tiny_zoo.VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.tensor([[0] * (max(LENGTHS) - length) + [1] * length for length in LENGTHS])
    padded = torch.where(mask.bool(), ids, model.generation_config.pad_token_id or 0)
    worst = 0.0
    with PagedCache(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE, check=True) as cache:
        for inputs in ({"input_ids": ids[1:]}, {"input_ids": padded, "attention_mask": mask}):
            worst = max(worst, _compared(_generate(model, inputs, None), _generate(model, inputs, cache)))
            cache.reset()
    return worst


def _generate(model: Any, inputs: dict[str, Any], cache: Any) -> Any:
    model.generation_config.eos_token_id = None
    extra = {} if cache is None else {"past_key_values": cache}
    return model.generate(
        **inputs,
        **extra,
        max_new_tokens=NEW_TOKENS,
        use_cache=True,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def _compared(expected: Any, actual: Any) -> float:
    if not torch.equal(expected.sequences, actual.sequences):
        return float("inf")
    one, two = torch.stack(expected.logits), torch.stack(actual.logits)
    return float((one - two).abs().max()) / float(one.max() - one.min())


def engine_result(model: Any) -> float:
    """Return the largest difference of logits between ragged steps on pages and the model alone, in spreads."""
    store = PagedKVCache.from_spec(observe_kv_spec(model), num_pages=NUM_PAGES, page_size=PAGE_SIZE, check=True)
    runner = ModelRunner(model, store)
    texts, error = run_schedule(runner, store)
    logits = stock_logits(model, texts[0])
    return error / float(logits.max() - logits.min())


def uses_interface(model: Any) -> bool:
    """Whether the model's attention goes through transformers' interface, where another one can be put."""
    called = []

    def spy(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(module)
        return query.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[3]), None

    transformers.AttentionInterface.register(SPY, spy)
    transformers.AttentionMaskInterface.register(SPY, eager_mask)
    found = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(one): one for one in found if one is not None}
    with implementation(list(configs.values()), SPY), torch.no_grad():
        try:
            model(input_ids=torch.ones(1, 3, dtype=torch.int64), use_cache=False)
        except Exception:
            return bool(called)
    return bool(called)


def _one_line(error: Exception) -> str:
    """Return the error's text without line breaks, and without the sizes of differences: those are the machine's."""
    text = " ".join(str(error).split())
    return re.sub(r"differ by \S+, allowed are [\d.e+-]+( \([\w.]+\))?", "differ", text)


def summary(found: list[Row]) -> list[tuple[str, int, int, int, int]]:
    """Return per way of attending: its name, rows, rows equal in the cache, rows equal in the engine, rows wrong."""
    table = []
    for name, used in (("through the attention interface", True), ("past it", False)):
        of_kind = [row for row in found if row.attention_interface == used]
        equal = [sum(getattr(row, column) == EQUAL for row in of_kind) for column in ("cache", "engine")]
        table.append((name, len(of_kind), *equal, sum(WRONG in {row.cache, row.engine} for row in of_kind)))
    return table


def markdown(found: list[Row], not_tried: dict[str, str]) -> str:
    """Return docs/models.md: an explanation, the sums, and a line for each architecture."""
    lines = [
        *(_INTRODUCTION.format(version=transformers.__version__, total=len(found)).splitlines()),
        "",
        "| attention | architectures | `PagedCache` equal | engine equal | wrong |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {count} | {cache} | {engine} | {wrong} |"
            for name, count, cache, engine, wrong in summary(found)
        ),
        "",
        *_REMARKS.splitlines(),
        "",
        "| architecture | model type | interface | `PagedCache` | engine | reason |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.architecture} | {row.model_type} | {'yes' if row.attention_interface else 'no'} | {row.cache} "
            f"| {row.engine} | {row.reason.replace('|', '/')} |"
            for row in found
        ),
        "",
        "## Not tried",
        "",
        *(f"- {model_type}: {reason}" for model_type, reason in sorted(not_tried.items())),
    ]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
# Which models work

<!-- Made by `python -m tests.transformers.coverage`; a test compares it with a fresh run. -->

Every decoder-only architecture of `MODEL_FOR_CAUSAL_LM_MAPPING` in transformers {version} whose config can be made
tiny, {total} of them: built with random weights (windows and chunks of 8 tokens), run in float32 with `PagedCache`
(greedy `generate`, one prompt of 14 tokens, then a left-padded batch of 9 and 14, twelve new tokens, pages of 4) and
in ragged steps of the engine (prompts that join mid-way, one of them in chunks), and compared with the model's own
eager attention on transformers' own cache. *Equal* is: the same tokens, and logits within 2e-3 of their spread.
*Refused* is an `UnsupportedModel` when the object is made, with the reason below. `docs/models.json` has the same
rows for programs."""

_REMARKS = """\
No model is known by name. `PagedCache` and the engine's runner try a few tokens when they are made and learn from
what each layer hands over whether pages alone serve it. A layer that attends to something else than it stores
(latents that are expanded afterwards, values that are split), or by a pattern that pages do not know, is handed K and
V gathered from the pages: equal, for the price of a gather. So are models that attend past the attention interface,
in `generate`; where an answer depends on what stands in padding, padding is stored as well. The engine refuses those,
since in their code the texts of a step would see each other. It refuses recurrent and convolution states too (one
state per row, where a step has many texts in one row), and models whose forward takes no positions.

Windows and chunks give pages back. `tests/transformers/test_gemma3.py` (slow) holds Gemma 3 270M, whose 15 of 18
layers see 512 tokens, to it: after a 4,000-token prompt, which decodes as with the stock cache, 416 pages of three
layers each are held (41 MB in float32), where 1,506 would be without windows (148 MB)."""


def main(model_types: list[str]) -> None:
    """Write the table, or print the rows of ``model_types``."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if model_types:
        wanted = [one for one in tiny_zoo.architectures() if one.model_type in model_types]
        found, not_tried = rows(wanted)
        sys.stdout.write("\n".join([*map(str, found), *(f"{key}: {reason}" for key, reason in not_tried.items()), ""]))
        return
    found, not_tried = rows()
    (DOCS / "models.json").write_text(json.dumps([row._asdict() for row in found], indent=1) + "\n", encoding="utf-8")
    (DOCS / "models.md").write_text(markdown(found, not_tried), encoding="utf-8")
    sys.stdout.write("\n".join(map(str, summary(found))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
