"""What connects transformers' models with a KV cache: `ModelRunner` runs a ragged step through any decoder.

Takes models of transformers 5.17 up to, not including, 6; other versions are refused at import. The models stay
untouched: their config says only during our own forward that attention is ours.
"""

from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.versions import require_supported

require_supported()

# After the check, for a clear message.
from pagedkv.transformers.observe import observe_kv_spec  # noqa: E402
from pagedkv.transformers.paged_cache import PagedCache  # noqa: E402
from pagedkv.transformers.runner import ModelRunner  # noqa: E402

__all__ = ["ModelRunner", "PagedCache", "UnsupportedModel", "observe_kv_spec"]
