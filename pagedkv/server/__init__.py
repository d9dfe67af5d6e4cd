"""An OpenAI-compatible HTTP server over one engine: FastAPI in front, `AsyncEngine` behind.

`create_app` is the application, for any ASGI server; `serve` runs it under uvicorn until a signal ends it. Needs the
extra ``serve``: ``pip install 'pagedkv[serve]'``.
"""

from pagedkv.server.app import create_app
from pagedkv.server.config import ServerConfig
from pagedkv.server.run import bind, serve

__all__ = ["ServerConfig", "bind", "create_app", "serve"]
