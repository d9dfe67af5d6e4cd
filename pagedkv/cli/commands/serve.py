"""Serve a model over HTTP, as OpenAI's clients expect it.

Paths: /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics (Prometheus). Only this machine can
connect unless --host says otherwise. A key, where one is wanted, comes from the environment variable PAGEDKV_API_KEY
or from a file, never from the command line, which everybody on the machine can read.

Ctrl-C or SIGTERM ends it: no new connections, and running answers have --grace seconds to end.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.cli.arguments import add_model_arguments, at_least_one, port, seconds
from pagedkv.cli.errors import CommandError, first_line

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Callable

    from rich.console import Console

    from pagedkv.engine import Engine
    from pagedkv.server import ServerConfig

HELP = "serve a model over HTTP, for OpenAI's clients"
KEY_VARIABLE = "PAGEDKV_API_KEY"
EXTRA = ("fastapi", "prometheus_client", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``serve``."""
    add_model_arguments(parser, default="the demo's, SmolLM2-135M-Instruct")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "auto"), default="float32",
        help="of weights and cache; auto: as the weights are stored (default: float32)",
    )  # fmt: skip
    web = parser.add_argument_group("network")
    web.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine alone")
    web.add_argument("--port", type=port, default=8000, metavar="N", help="0 is any free one (default: 8000)")
    web.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"holds the key; else ${KEY_VARIABLE}, else none"
    )
    web.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: as it was loaded)")
    web.add_argument("--access-log", action="store_true", help="a line per request")
    cache = parser.add_argument_group("memory and batch")
    cache.add_argument("--memory", metavar="SIZE", help="of the cache, such as 2GiB (default: from the machine's)")
    cache.add_argument("--max-len", type=at_least_one, metavar="N", help="tokens of one request (default: the context)")
    cache.add_argument("--max-batch", type=at_least_one, metavar="N", help="requests at once (default: what fits)")
    cache.add_argument("--max-step-tokens", type=at_least_one, metavar="N", help="default: from the memory")
    cache.add_argument(
        "--scheduling", choices=("fcfs", "priority"), default="fcfs",
        help="priority: requests may carry a priority, -100 to 100, smaller goes first (default: fcfs)",
    )  # fmt: skip
    cache.add_argument("--no-prefix-cache", action="store_true", help="requests share no pages")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-requests", type=at_least_one, default=256, metavar="N",
        help="unfinished at a time; more get 429 (default: 256)",
    )  # fmt: skip
    limits.add_argument(
        "--max-body", type=at_least_one, default=2**20, metavar="BYTES", help="more gets 413 (default: 1048576)"
    )
    limits.add_argument("--body-timeout", type=seconds, default=30.0, metavar="S", help="more gets 408 (default: 30)")
    limits.add_argument("--grace", type=seconds, default=30.0, metavar="S", help="for running answers (default: 30)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; return 0."""
    require_extra()
    from rich.console import Console

    from pagedkv.cli.models import load_model, set_threads
    from pagedkv.engine import Engine
    from pagedkv.server import ServerConfig, serve

    console = Console(stderr=True, highlight=False)
    key = read_key(args.api_key_file)
    bound = _bind(args.host, args.port)
    try:
        set_threads(args.threads)
        with console.status("Loading the model"):
            loaded = load_model(args.model, lambda line: console.print(f"{line} …", style="dim"), args.dtype)
        try:
            engine = Engine(
                loaded.model,
                loaded.tokenizer,
                memory=args.memory,
                max_len=args.max_len,
                max_batch=args.max_batch,
                max_step_tokens=args.max_step_tokens,
                prefix_cache=not args.no_prefix_cache,
                scheduling=args.scheduling,
            )
            config = ServerConfig(
                model_name=args.model_name or loaded.name,
                api_key=key,
                max_requests=args.max_requests,
                max_body_bytes=args.max_body,
                body_timeout=args.body_timeout,
                grace=args.grace,
            )
        except ValueError as error:
            raise CommandError(first_line(error)) from error
        serve(engine, config, bound, on_start=_welcome(console, engine, config, bound), access_log=args.access_log)
    finally:
        bound.close()
    console.print("pagedkv serve: ended")
    return 0


def require_extra() -> None:
    """Refuse with the name of the extra where one of its packages is missing."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        raise CommandError(f"serving over HTTP needs {names}: pip install 'pagedkv[serve]'")


def read_key(file: Path | None) -> str | None:
    """Return the key in ``file``, else the environment's, else None.

    Raises:
        CommandError: if the file cannot be read, or the key is empty or no printable ASCII.
    """
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--api-key-file must be a readable text file: {first_line(error)}") from error
        source = f"--api-key-file {str(file)!r}"
    elif KEY_VARIABLE in os.environ:
        key, source = os.environ[KEY_VARIABLE], f"${KEY_VARIABLE}"
    else:
        return None
    if not key or not all("!" <= char <= "~" for char in key):
        raise CommandError(f"{source} must hold a key of printable ASCII without spaces")
    return key


def _bind(host: str, number: int) -> socket.socket:
    from pagedkv.server import bind

    try:
        return bind(host, number)
    except OSError as error:
        raise CommandError(
            f"--host and --port must be free, were {host!r} and {number}: {first_line(error)}"
        ) from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _welcome(console: Console, engine: Engine, config: ServerConfig, bound: socket.socket) -> Callable[[], None]:
    """Return what says where the server is and what it allows, once it can be reached."""

    def say() -> None:
        address, number = bound.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        cache: Any = engine.backend
        rows = {
            "model": f"{config.model_name}, {engine.core.max_len:,} tokens of context",
            "cache": f"{cache.allocator.num_pages:,} pages of {cache.page_size} tokens, "
            f"{cache.allocator.num_pages * cache.page_bytes / 2**20:,.0f} MiB",
            "limits": f"{config.max_requests:,} unfinished requests, bodies of {config.max_body_bytes:,} bytes",
            "key": "none is asked for" if config.api_key is None else "asked for: Authorization: Bearer …",
        }
        console.print(f"pagedkv serve: http://{shown}:{number}/v1", markup=False, soft_wrap=True)
        for name, text in rows.items():
            console.print(f"  {name:<8}{text}", markup=False, soft_wrap=True)
        if config.api_key is None and not _is_loopback(address):
            console.print(
                f"  warning: everybody who reaches {address} can use it; set {KEY_VARIABLE} to ask for a key",
                style="yellow", markup=False, soft_wrap=True,
            )  # fmt: skip
        console.print(f"Ctrl-C ends it; running answers get {config.grace:g} s.", style="dim")

    return say
