"""The engines under test behind one small interface, each importable without the others.

A subject takes greedy requests by token ids and gives their tokens as they come, or, where it serves batches only, all
of them at the end. Everything is imported when a subject is made: a worker has the packages of its own environment.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY = 2 * 2**30
"""Bytes of KV memory that engines with pages get."""

MAX_BATCH = 64
MAX_LEN = 2048


class Subject(Protocol):
    """An engine that is stepped."""

    def start(self, num_pages: int | None) -> None:
        """Forget all that earlier requests have left."""

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """Take a request for exactly so many tokens."""

    def step(self) -> dict[int, list[int]]:
        """Run once; return the new tokens of each request."""

    def close(self) -> dict[str, float]:
        """Say what it cost beside time."""


class PagedKV:
    """Our engine, over the paged cache or a baseline."""

    def __init__(self, model: str, dtype: str, backend: str) -> None:
        """Load the model."""
        torch, load = import_module("torch"), import_module("pagedkv.engine.build").load_pretrained
        self._model, _ = load(model, getattr(torch, dtype), None)
        self._backend = backend
        self._engines: dict[int | None, Any] = {}
        self._params = import_module("pagedkv").SamplingParams

    def start(self, num_pages: int | None) -> None:
        """Empty the cache: its pages keep nothing from the last run."""
        paged = self._backend == "pagedkv"
        if num_pages not in self._engines:
            options: dict[str, Any] = {"backend": None if paged else self._backend}
            if paged:
                options |= {"memory": MEMORY} if num_pages is None else {"num_pages": num_pages, "watermark": 0.0}
            length = MAX_LEN if self._backend != "static" else MAX_LEN // 4
            engine = import_module("pagedkv").Engine
            self._engines[num_pages] = engine(self._model, max_batch=MAX_BATCH, max_len=length, **options)
        self._engine = self._engines[num_pages]
        if paged:
            self._engine.backend.allocator.reset_prefix_cache()
        self._meter = import_module("pagedkv.cli.subjects").MemoryMeter()
        self._before = (self._engine.stats.cached_tokens, self._engine.stats.preemptions)

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """Take a request."""
        self._engine.add_request(index, prompt, self._params(max_new_tokens=new_tokens, ignore_eos=True))

    def step(self) -> dict[int, list[int]]:
        """Run once."""
        outputs = self._engine.step()
        self._meter.observe(self._engine.backend.usage())
        return {output.request_id: output.token_ids for output in outputs}

    def close(self) -> dict[str, float]:
        """Return memory, hits and preemptions of this run."""
        stats, usage = self._engine.stats, self._engine.backend.usage()
        if usage.in_use:
            raise RuntimeError(f"{self._backend} still holds {usage.in_use} pages or slabs when all is done")
        return {
            "KV held at most, MiB": self._meter.peak.bytes_held / 2**20,
            "waste, mean, %": 100 * self._meter.waste,
            "prompt tokens reused": stats.cached_tokens - self._before[0],
            "preemptions": stats.preemptions - self._before[1],
        }


class VLLM:
    """vLLM's engine, in this process, so that stopping the process stops all of it."""

    def __init__(self, model: str, dtype: str, _: str) -> None:
        """Load the model; its threads and memory come by the environment variables of `bench_engine`."""
        vllm = import_module("vllm")
        self._llm = vllm.LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_BATCH,
            disable_log_stats=True,
        )
        self._params = vllm.SamplingParams
        self._engine = self._llm.llm_engine

    def start(self, num_pages: int | None) -> None:
        """Empty the prefix cache."""
        if num_pages is not None:
            raise ValueError("num_pages must be None for vllm")
        self._llm.reset_prefix_cache()
        self._told: dict[int, int] = {}

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """Take a request."""
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(index), {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[int, list[int]]:
        """Run once."""
        found = {}
        for output in self._engine.step():
            index, tokens = int(output.request_id), list(output.outputs[0].token_ids)
            found[index] = tokens[self._told.get(index, 0) :]
            self._told[index] = len(tokens)
        return found

    def close(self) -> dict[str, float]:
        """Tell nothing more."""
        return {}


class Whole:
    """transformers' own ways to serve a batch: the first step serves all that was added."""

    def __init__(self, model: str, dtype: str, way: str) -> None:
        """Load the model."""
        torch, load = import_module("torch"), import_module("pagedkv.engine.build").load_pretrained
        self.model, _ = load(model, getattr(torch, dtype), None)
        self._serve: Callable[[list[list[int]], int], list[list[int]]] = (
            self._padded if way == "generate" else self._continuous
        )

    def start(self, num_pages: int | None) -> None:
        """Begin with no requests."""
        if num_pages is not None and self._serve == self._continuous:
            raise ValueError("num_pages must be None for generate_batch")
        self._prompts: list[list[int]] = []
        self._new_tokens = 0

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """Take a request; all of one run have the same ``new_tokens``."""
        assert index == len(self._prompts)
        self._prompts.append(prompt)
        self._new_tokens = new_tokens

    def step(self) -> dict[int, list[int]]:
        """Serve all of them."""
        return dict(enumerate(self._serve(self._prompts, self._new_tokens)))

    def _padded(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        torch = import_module("torch")
        longest = max(map(len, prompts))
        rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            input_ids=rows,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[list[int]] = output[:, longest:].tolist()
        return tokens

    def _continuous(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        config = import_module("transformers").GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = self.model.generate_batch(prompts, generation_config=config, progress_bar=False)
        found = sorted(outputs.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        return [list(output.generated_tokens) for _, output in found]

    def close(self) -> dict[str, float]:
        """Tell nothing more."""
        return {}


def make(kind: str, model: str, dtype: str) -> Subject:
    """Return the subject called ``kind``."""
    if kind == "vllm":
        return VLLM(model, dtype, kind)
    if kind in {"generate", "generate_batch"}:
        return Whole(model, dtype, kind)
    return PagedKV(model, dtype, kind)
