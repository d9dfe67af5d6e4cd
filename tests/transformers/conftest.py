"""What the tests of this folder share: transformers' own cache, and its renaming warning silenced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def stock_cache() -> Callable[[Any], Any]:
    """Return a maker of the cache that ``generate`` would make for a model."""
    return lambda model: DynamicCache(config=model.config.get_text_config(decoder=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests hand the stock cache over by the name that both supported versions know."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"))
