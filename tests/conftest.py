"""What all tests share: one thread per process, no network, and how Hypothesis searches."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from hypothesis import settings

# `make test` must give the same verdict twice; `make test-all` looks for new examples every time.
settings.register_profile("fast", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("PAGEDKV_TEST_PROFILE", "fast"))
