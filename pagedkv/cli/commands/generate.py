"""Answer prompts with a model out of paged memory.

One prompt streams to stdout as it is written. Several (arguments, lines of a file, lines of stdin) are served together
as one continuous batch and printed in their order. Without prompts and without --file, stdin is read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv.cli.arguments import add_model_arguments, at_least_one, fraction, not_negative, temperature
from pagedkv.cli.errors import CommandError, first_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from pagedkv.engine import Engine, SamplingParams

HELP = "answer your own prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``generate``."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; '-' reads one per line from stdin")
    parser.add_argument("--file", type=Path, metavar="FILE", help="a UTF-8 file with one prompt per line")
    add_model_arguments(parser, default="the demo's, SmolLM2-135M-Instruct")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message, in the model's template")
    parser.add_argument("--max-new-tokens", type=at_least_one, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-p", type=fraction, default=1.0, metavar="P", help="1 turns the filter off (default)")
    parser.add_argument("--seed", type=not_negative, metavar="N", help="the same seed draws the same tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt and line")


def run(args: argparse.Namespace) -> int:
    """Answer every prompt; return 0."""
    prompts = read_prompts(args.prompts, args.file)
    from rich.console import Console

    from pagedkv.cli.models import chat_token_ids, load_model, set_threads, text_token_ids
    from pagedkv.engine import Engine, SamplingParams

    console = Console(stderr=True, highlight=False)
    set_threads(args.threads)
    with console.status("Loading the model"):
        loaded = load_model(args.model, lambda line: console.print(f"{line} …", style="dim"))
    if args.chat and loaded.tokenizer.chat_template is None:
        raise CommandError(f"--chat needs a model with a chat template; {loaded.name!r} has none")
    try:
        params = SamplingParams(
            temperature=args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens, seed=args.seed
        )
        engine = Engine(loaded.model, tokenizer=loaded.tokenizer)
    except ValueError as error:
        raise CommandError(first_line(error)) from error
    for index, prompt in enumerate(prompts):
        if args.chat:
            token_ids = chat_token_ids(loaded.tokenizer, [{"role": "user", "content": prompt}])
        else:
            token_ids = text_token_ids(loaded.tokenizer, prompt)
        _add(engine, index, token_ids, params)
    if len(prompts) == 1 and not args.json:
        _stream(engine)
    else:
        _print_in_order(engine, prompts, as_json=args.json)
    return 0


def read_prompts(arguments: list[str], file: Path | None) -> list[str]:
    """Return the prompts of the arguments, then of the file; stdin stands for ``-`` and for nothing at all.

    Raises:
        CommandError: if the file cannot be read as UTF-8 text, or there is no prompt.
    """
    prompts = []
    for argument in arguments if arguments or file is not None else ["-"]:
        prompts += list(_lines(sys.stdin.read())) if argument == "-" else [argument]
    if file is not None:
        try:
            prompts += list(_lines(file.read_text(encoding="utf-8-sig")))
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--file must be a readable UTF-8 file, {str(file)!r}: {first_line(error)}") from error
    for number, prompt in enumerate(prompts, 1):
        if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise CommandError(f"prompt {number} must be UTF-8 text, was {prompt!r:.60}")
    if not prompts:
        raise CommandError("there is no prompt: give one as an argument, with --file or on stdin")
    return prompts


def _lines(text: str) -> Iterator[str]:
    """Return the lines that hold anything; only a newline ends one (a prompt may hold other separators)."""
    return (line.removesuffix("\r") for line in text.split("\n") if line.strip())


def _add(engine: Engine, index: int, token_ids: list[int], params: SamplingParams) -> None:
    try:
        engine.add_request(index, token_ids, params)
    except ValueError as error:
        raise CommandError(f"prompt {index + 1}: {first_line(error)}") from error


def _stream(engine: Engine) -> None:
    while engine.has_unfinished:
        for output in engine.step():
            sys.stdout.write(output.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _print_in_order(engine: Engine, prompts: list[str], *, as_json: bool) -> None:
    """Print each answer as soon as it and all before it are finished."""
    from pagedkv.cli.subjects import request_index

    texts = [""] * len(prompts)
    finished: dict[int, tuple[str, int]] = {}
    printed = 0
    while engine.has_unfinished:
        for output in engine.step():
            index = request_index(output)
            texts[index] += output.text
            if output.finish_reason is not None and output.metrics is not None:
                finished[index] = (output.finish_reason, output.metrics.new_tokens)
        while printed in finished:
            reason, num_tokens = finished[printed]
            prompt, text = prompts[printed], texts[printed]
            if as_json:
                record = {"prompt": prompt, "text": text, "finish_reason": reason, "new_tokens": num_tokens}
                sys.stdout.write(json.dumps(record, ensure_ascii=not _writes_unicode()) + "\n")
            else:
                sys.stdout.write(f"[{printed + 1}] {prompt}\n{text.strip()}\n\n")
            sys.stdout.flush()
            printed += 1


def _writes_unicode() -> bool:
    """Whether stdout takes every character; where not, JSON has escapes of its own for them."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")
