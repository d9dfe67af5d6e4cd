"""A client that goes away ends what is done for it.

Takes a connection's ``receive`` and some work for its client; gives the work's result, or cancels it when the client
has gone; refuses to know what the work is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818  (nobody's error)
    """The client closed its connection before its answer was there."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is cancelled, and has ended, if the client goes or the caller is cancelled.

    The request's body must have been read.

    Raises:
        ClientGone: if the client goes first.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
