"""What one request asks for: how its tokens are chosen, and when it ends.

Takes what a caller wrote, keeps it in plain types, and refuses every value out of its range by name, at construction.
What the numbers do stands in the sampler's files and in docs/sampling.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from pagedkv.engine.checks import require_int, require_number, require_token_ids

MAX_SEED: Final = 2**64 - 1
MAX_STOPS: Final = 64
MAX_STOP_LENGTH: Final = 256
MAX_STOP_TOKENS: Final = 1024
MAX_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_DRAFT: Final = 64
_BEAM_OPTIONS = frozenset(
    {"n", "max_new_tokens", "stop_token_ids", "ignore_eos", "num_beams", "length_penalty", "early_stopping", "seed"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Checked at construction.

    Attributes:
        temperature: logits are divided by it; 0 is greedy: the lowest id among the largest logits. Finite, at least 0.
        top_k: keep so many most likely tokens, of equal ones those with the lowest ids; 0 (or -1) turns it off.
        top_p: keep the smallest set of most likely tokens whose probability reaches it (after temperature and top-k),
            at least the top one; 1 turns the filter off. 0 to 1.
        min_p: keep tokens at least so likely as this share of the top one's probability; 0 turns it off. 0 to 1.
        repetition_penalty: tokens of prompt and answer: positive logits divided, negative ones multiplied by it. 1 is
            off. 0.01 to 100.
        presence_penalty: taken from the logit of every token that the answer has. -2 to 2.
        frequency_penalty: taken from it as many times as the answer has the token. -2 to 2.
        logit_bias: by token id, what is added to its logit, -100 to 100; at most 1,024 of them.
        seed: 0 to 2**64 - 1; the same seed, prompt and model give the same tokens, whatever else runs. Sample ``i`` of
            ``n`` draws as a request with seed ``seed + i`` does. None: the engine draws one.
        n: samples of the same prompt, whose pages they share; with beams: how many of the best are returned.
        max_new_tokens: the most tokens to generate, at least 1.
        min_new_tokens: before so many tokens no EOS, stop token or stop string ends the answer.
        stop: texts that end the answer, which is cut before them; at most 64 of at most 256 characters.
        stop_token_ids: tokens that end the request, besides the engine's EOS ids; at most 1,024.
        ignore_eos: go on past EOS; ``stop`` and ``stop_token_ids`` still end the request.
        logprobs: give each token's log-probability and those of so many most likely ones, 0 to 20; None: none.
        prompt_logprobs: the same for the prompt's tokens. The prompt is then computed whole, whatever is stored of it.
        draft_tokens: the most tokens a step to draft from the request's own text (prompt lookup), 0 to 64.
        num_beams: beams of a beam search; 1 is none. Goes with ``n``, the two options below and those of length and
            stop tokens only.
        length_penalty: a finished beam's score is its summed log-probability / length ** length_penalty. -10 to 10.
        early_stopping: True: end with ``num_beams`` finished beams; False: when none that runs looks better at its
            present length; "never": when none can be better at any length.

    Raises:
        ValueError, TypeError: for values outside these ranges and types.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    seed: int | None = None
    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        """Check every field and keep it in its plain type."""
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, was {self.ignore_eos!r}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise TypeError(f"early_stopping must be True, False or 'never', was {self.early_stopping!r}")
        new = require_int("max_new_tokens", self.max_new_tokens, 1)
        checked = {
            "temperature": require_number("temperature", self.temperature, 0),
            "top_k": max(0, require_int("top_k", self.top_k, -1)),
            "top_p": require_number("top_p", self.top_p, 0, 1),
            "min_p": require_number("min_p", self.min_p, 0, 1),
            "repetition_penalty": require_number("repetition_penalty", self.repetition_penalty, 0.01, 100),
            "presence_penalty": require_number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": require_number("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": _biases(self.logit_bias),
            "seed": None if self.seed is None else require_int("seed", self.seed, 0, MAX_SEED),
            "n": require_int("n", self.n, 1),
            "max_new_tokens": new,
            "min_new_tokens": require_int("min_new_tokens", self.min_new_tokens, 0, new),
            "stop": _stops(self.stop),
            "stop_token_ids": tuple(require_token_ids("stop_token_ids", self.stop_token_ids, None)),
            "logprobs": _none_or("logprobs", self.logprobs, MAX_LOGPROBS),
            "prompt_logprobs": _none_or("prompt_logprobs", self.prompt_logprobs, MAX_LOGPROBS),
            "draft_tokens": require_int("draft_tokens", self.draft_tokens, 0, MAX_DRAFT),
            "num_beams": require_int("num_beams", self.num_beams, 1),
            "length_penalty": require_number("length_penalty", self.length_penalty, -10, 10),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        _require_few("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        self._require_beams()

    def _require_beams(self) -> None:
        """Refuse what does not go together with beams, or only with them."""
        defaults = {field.name: field.default for field in fields(self)}
        if self.num_beams == 1:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != defaults[name]:
                    raise ValueError(
                        f"{name} must be {defaults[name]!r} without beams (num_beams = 1), was {getattr(self, name)!r}"
                    )
            return
        for name, default in defaults.items():
            if name not in _BEAM_OPTIONS and getattr(self, name) != default:
                raise ValueError(
                    f"{name} must be {default!r} with num_beams = {self.num_beams}: beams go by the model's own "
                    f"log-probabilities, was {getattr(self, name)!r}"
                )
        if self.n > self.num_beams:
            raise ValueError(f"n must be at most num_beams = {self.num_beams}, was {self.n}")

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before they are looked at: a bias or a penalty is on."""
        return bool(self.logit_bias or self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


def _none_or(name: str, value: object, high: int) -> int | None:
    return None if value is None else require_int(name, value, 0, high)


def _require_few(name: str, values: Sequence[Any], most: int) -> None:
    if len(values) > most:
        raise ValueError(f"{name} must hold at most {most:,} entries, held {len(values):,}")


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    pairs: Any = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, Sequence) or isinstance(pairs, str | bytes):
        raise TypeError(f"logit_bias must map token ids to numbers, was {type(given).__name__}")
    _require_few("logit_bias", pairs, MAX_BIASES)
    checked: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str | bytes) or len(pair) != 2:
            raise TypeError(f"logit_bias must map token ids to numbers, held {pair!r}")
        token = require_int("logit_bias's token id", pair[0], 0)
        if token in checked:
            raise ValueError(f"logit_bias must name each token once, named {token} twice")
        checked[token] = require_number(f"logit_bias[{token}]", pair[1], -100, 100)
    return tuple(sorted(checked.items()))


def _stops(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        raise TypeError(f"stop must be a text or a list of texts, was {type(given).__name__}")
    _require_few("stop", texts, MAX_STOPS)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"stop[{index}] must be a text, was {text!r:.60}")
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise ValueError(f"stop[{index}] must have 1 to {MAX_STOP_LENGTH} characters, had {len(text)}")
    return tuple(texts)


def require_bias_ids(params: SamplingParams, vocab_size: int | None) -> None:
    """Refuse a ``logit_bias`` for what is no token of the model; ids are 0 to ``vocab_size - 1``, None: unknown."""
    high = math.inf if vocab_size is None else vocab_size - 1
    for token in dict(params.logit_bias):
        if token > high:
            raise ValueError(f"logit_bias's token id must be 0 to {high}, was {token}")


def one_each(params: Any, count: int) -> list[SamplingParams | None]:
    """Return the params of each of ``count`` prompts; ``params`` are one for all, or one each."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise TypeError(f"params must be SamplingParams or a list of them, was {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"params must be one, or one for each of {count} prompts, were {len(params)}")
    return list(params)
