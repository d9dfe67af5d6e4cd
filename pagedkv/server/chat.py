"""The shape of ``/v1/chat/completions``: an assistant's message, whole or in pieces.

Takes samples and step outputs, gives the choices of OpenAI's ``chat.completion`` objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine import Logprob, Sample, StepOutput
    from pagedkv.server.token_text import TokenText

    Json = dict[str, Any]


class ChatShape:
    """Writes choices of a chat; ``token_text`` says what log-probabilities are of, None where nobody asked for them."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, token_text: TokenText | None) -> None:
        self._token_text = token_text

    def whole(self, index: int, sample: Sample) -> Json:
        """Return a finished message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs(sample.logprobs),
            "finish_reason": sample.finish_reason,
        }

    def opening(self, index: int) -> Json:
        """Return who speaks."""
        return _chunk(index, {"role": "assistant", "content": ""})

    def pieces(self, index: int, output: StepOutput) -> list[Json]:
        """Return the text that has become certain, where there is any, and the reason of the end."""
        pieces = []
        logprobs = self._logprobs(output.logprobs)
        if output.text or logprobs:
            pieces.append(_chunk(index, {"content": output.text}, logprobs))
        if output.finished:
            pieces.append(_chunk(index, {}, finish_reason=output.finish_reason))
        return pieces

    def _logprobs(self, found: Sequence[Logprob]) -> Json | None:
        if self._token_text is None:
            return None
        content = []
        for one in found:
            top = [self._entry(token_id, logprob) for token_id, logprob in one.top]
            content.append({**self._entry(one.token_id, one.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token_id: int, logprob: float) -> Json:
        text, raw = self._token_text(token_id) if self._token_text else ("", None)
        return {"token": text, "logprob": logprob, "bytes": raw}


def _chunk(index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
