"""Two hundred clients at once, many of whom leave in the middle: all other answers are right, nothing is left."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pagedkv import Engine, SamplingParams
from pagedkv.engine.build import load_pretrained
from tests.cli.tiny_chat import save_tiny_chat_model
from tests.server.running import NAME, running

if TYPE_CHECKING:
    from pathlib import Path

CLIENTS = 200
ROUNDS = 2
WORDS = ("one", "two", "three", "birds", "trees", "day", "kind")


async def visit(
    client: openai.AsyncOpenAI, prompt: str, options: dict[str, Any], leave_after: int | None
) -> str | None:
    """Return an answer's text, streamed; None if the client leaves after so many chunks."""
    stream = await client.completions.create(model=NAME, prompt=prompt, stream=True, **options)
    text, chunks = "", 0
    async with stream:
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            chunks += 1
            if leave_after is not None and chunks >= leave_after:
                return None
    return text


@pytest.mark.slow
def test_a_crowd_with_random_departures(tmp_path: Path) -> None:
    """Every answer is what the engine gives alone; at the end no page is in use and no request is left, each round."""
    save_tiny_chat_model(tmp_path, max_len=256)
    draw = random.Random(5)
    visits: list[tuple[str, dict[str, Any], int | None]] = []
    for _ in range(CLIENTS):
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))
        options = {"max_tokens": draw.randint(1, 40), "temperature": draw.choice([0, 1]), "seed": draw.randrange(100)}
        visits.append((prompt, options, draw.choice([None, None, 1, 3])))
    alone = Engine(*load_pretrained(tmp_path, None, None), num_pages=400)
    params = [
        SamplingParams(max_new_tokens=options["max_tokens"], temperature=options["temperature"], seed=options["seed"])
        for _, options, _ in visits
    ]
    expected = [completion.text for completion in alone.generate([prompt for prompt, _, _ in visits], params)]

    async def crowd(url: str) -> list[str | BaseException | None]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
            return await asyncio.gather(*[visit(client, *one) for one in visits], return_exceptions=True)

    engine = Engine(*load_pretrained(tmp_path, None, None), num_pages=120)  # far from enough for everybody
    with running(engine) as here:
        for _ in range(ROUNDS):
            found = asyncio.run(crowd(here.url))
            # Who leaves after more chunks than there are has the whole answer.
            left = [one[2] is not None and text is None for one, text in zip(visits, found, strict=True)]
            assert any(left)
            assert [None if gone else text for gone, text in zip(left, expected, strict=True)] == found
            here.wait_until_idle()
            assert 0 == len(here.served._inboxes) == here.served.num_running == here.served.num_waiting
    assert 0 == engine.backend.usage().in_use
    engine.backend.allocator.check()  # type: ignore[attr-defined]
