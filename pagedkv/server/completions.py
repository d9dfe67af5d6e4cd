"""The shape of ``/v1/completions``: plain text that goes on where the prompt ends, whole or in pieces.

Takes samples and step outputs, gives the choices of OpenAI's ``text_completion`` objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine import Logprob, Sample, StepOutput
    from pagedkv.server.token_text import TokenText

    Json = dict[str, Any]


class CompletionShape:
    """Writes choices of text; ``token_text`` says what log-probabilities are of, None where nobody asked for them."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, token_text: TokenText | None) -> None:
        self._token_text = token_text
        self._offsets: dict[int, int] = {}

    def whole(self, index: int, sample: Sample) -> Json:
        """Return a finished text."""
        return self._choice(index, sample.text, sample.logprobs, sample.finish_reason)

    def opening(self, index: int) -> None:
        """Say nothing before the first token."""

    def pieces(self, index: int, output: StepOutput) -> list[Json]:
        """Return the text that has become certain, and the reason of the end, where there is one of them."""
        if not (output.text or output.finished or (self._token_text and output.logprobs)):
            return []
        return [self._choice(index, output.text, output.logprobs, output.finish_reason)]

    def _choice(self, index: int, text: str, found: Sequence[Logprob], finish_reason: str | None) -> Json:
        logprobs = self._logprobs(index, found)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, found: Sequence[Logprob]) -> Json | None:
        if self._token_text is None:
            return None
        tokens, offsets, tops = [], [], []
        for one in found:
            tokens.append(self._token_text(one.token_id)[0])
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(tokens[-1])
            tops.append({self._token_text(token_id)[0]: logprob for token_id, logprob in one.top})
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
