"""The end-to-end part of `benchmarks/gpu.py`: a random Llama of 1B parameters, four ways to generate from it.

Takes sizes and a device, gives seconds; greedy, so many new tokens from each prompt whatever they are.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINE_SUBJECTS = ("engine, no graphs", "engine, graphs", "model.generate", "generate_batch")
_LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 64,
}  # fmt: skip
_LLAMA_TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "head_dim": 16,
}  # fmt: skip


class EngineRun:
    """A model and its prompts: ``batch`` of ``length`` random tokens."""

    def __init__(self, batch: int, length: int, device: str, dtype: torch.dtype, *, small: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = _LLAMA_TINY if small else _LLAMA_1B
        config = LlamaConfig(
            **sizes, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0
        )
        torch.manual_seed(0)
        with torch.device(device):
            self.model = LlamaForCausalLM(config).to(torch.float32 if small else dtype).eval()
        self.device = device
        self.new_tokens = 3 if small else 128
        self.ids = torch.randint(1, sizes["vocab_size"], (batch, length))
        self.made = batch * self.new_tokens

    def seconds(self, subject: str) -> float:
        """Return the time of a second run, when kernels are compiled and graphs captured."""
        run = self._subject(subject)
        run()
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _subject(self, subject: str) -> Callable[[], object]:
        makers: dict[str, Callable[[], Callable[[], object]]] = {
            "engine, no graphs": lambda: self._engine(False),
            "engine, graphs": lambda: self._engine(None),
            "model.generate": lambda: self._generate,
            "generate_batch": lambda: self._generate_batch,
        }
        return makers[subject]()

    def _engine(self, graphs: bool | None) -> Callable[[], object]:
        from pagedkv.engine import Engine, SamplingParams

        batch, length = self.ids.shape
        pages = 2 + batch * (-(-(length + self.new_tokens) // 16))
        engine = Engine(
            self.model, num_pages=pages, max_batch=batch, prefix_cache=False, max_step_tokens=4096, cuda_graphs=graphs
        )
        params = SamplingParams(max_new_tokens=self.new_tokens, ignore_eos=True)
        prompts: list[list[int]] = self.ids.tolist()
        return lambda: engine.generate(prompts, params)

    def _generate(self) -> object:
        model: Any = self.model
        return model.generate(
            self.ids.to(self.device), max_new_tokens=self.new_tokens, min_new_tokens=self.new_tokens, do_sample=False
        )

    def _generate_batch(self) -> object:
        from transformers import GenerationConfig

        model: Any = self.model
        options = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return model.generate_batch(inputs=self.ids.tolist(), generation_config=options)
