"""What all tests share: one thread per process, no network, interpreted kernels, and how Hypothesis searches.

Triton decides when it is imported whether it interprets kernels or compiles them, for the whole process. Tests
interpret (a CPU is all they need), unless PAGEDKV_TEST_DEVICE names a GPU; what must be compiled is compiled in
processes of its own (`tests.attention.compiled`).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1" if os.environ.get("PAGEDKV_TEST_DEVICE", "cpu") == "cpu" else "0"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from hypothesis import settings

# `make test` must give the same verdict twice; `make test-all` looks for new examples every time.
settings.register_profile("fast", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("PAGEDKV_TEST_PROFILE", "fast"))
