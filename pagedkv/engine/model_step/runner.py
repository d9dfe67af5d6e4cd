"""FastRunner: a model's runner with everything around attention replaced by what is faster and equal.

Takes a `ModelRunner`, gives the same forward; the model is as it was between steps. What is replaced is found once, at
construction, piece by piece (`linears`, `gates`, `norms`, `rotary`), and then the whole model is run with and without:
where the logits part, nothing is replaced.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.engine.model_step.acceptance import Acceptance
from pagedkv.engine.model_step.gates import patch_gates
from pagedkv.engine.model_step.linears import patch_linears
from pagedkv.engine.model_step.norms import patch_norms
from pagedkv.engine.model_step.observe import Observed, observe, plain_logits
from pagedkv.engine.model_step.patches import Patches
from pagedkv.engine.model_step.plan import MOST_TOKENS, StepPlan, make_plan
from pagedkv.engine.model_step.products import packed_bytes, packing
from pagedkv.engine.model_step.rotary import patch_rotary
from pagedkv.engine.model_step.watching import Structure, Weights
from pagedkv.native.library import LibraryUnavailableError, load
from pagedkv.sizing import free_memory
from pagedkv.transformers.probe import trial_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedkv.backend import StepBatch
    from pagedkv.transformers import ModelRunner

_LOGGER = logging.getLogger("pagedkv")
_TRIAL_TOKENS = 11
_SHARE_OF_FREE_MEMORY = 4


class FastRunner:
    """Runs steps through ``runner`` with the model's slow parts replaced for their duration.

    Args:
        runner: the model's own.
        packed: whether linears get packed copies of their weights for prefill's many rows, which double the model's
            memory (triple it where bfloat16 has to be widened); None: where the copies take at most a quarter of the
            free memory.
        exact: whether every token stays the model's own, even at a tie: norms and gates stay as they are, and of the
            rest only what is bit-equal on the trials is replaced.
        threads: of torch's pool while a step runs; None leaves the pool alone.

    Attributes:
        extra_bytes: what the copies take.

    On other devices than the CPU, and in dtypes that the C functions do not know, nothing is replaced. Weights and
    attributes of modules may change between steps; what stands inside an attribute, in the config say, may not.
    """

    def __init__(
        self, runner: ModelRunner, *, packed: bool | None = None, exact: bool = False, threads: int | None = None
    ) -> None:
        self._runner = runner
        self._threads = threads
        self._exact = exact
        model: Any = runner.model
        fits = weight_bytes(model) <= free_memory(torch.device("cpu")) // _SHARE_OF_FREE_MEMORY
        self._packed = fits if packed is None else packed
        with self._thread_pool():
            self._look()

    def _look(self) -> None:
        """Find what the model's weights as they are now allow."""
        model: Any = self._runner.model
        self._patches = find_patches(model, packed=self._packed, exact=self._exact)
        self._watched = self._patches.weights
        self._structure = Structure(model)
        self._plan: StepPlan | None = None
        self._planned = model.device.type != "cpu"
        self._make_plan()

    def _make_plan(self) -> None:
        """Make the plan unless that was done, or somebody listens to the modules meanwhile."""
        if self._planned or not self._structure.unchanged():
            return
        self._planned = True
        weights = Weights(*self._runner.model.modules())
        with self._patches.applied():
            plan = make_plan(self._runner)
        # A model that leaves something behind in its buffers or attributes would miss it.
        if plan is not None and weights.unchanged() and self._structure.unchanged():
            self._plan, self._watched = plan, [weights]

    @property
    def has_plan(self) -> bool:
        """Whether steps run without the model's modules, by their calls alone."""
        return self._plan is not None

    @property
    def extra_bytes(self) -> int:
        """See the class."""
        return self._patches.extra_bytes

    def forward(self, batch: StepBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step as `ModelRunner.forward` does.

        Weights that have changed since they were copied are copied anew first. In large steps, and while a module has
        another attribute than it had, a listener, or something in its place, the modules run.
        """
        with self._thread_pool():
            if not all(one.unchanged() for one in self._watched):
                self._look()
            if len(batch.position_ids) <= MOST_TOKENS and self._structure.unchanged():
                self._make_plan()
                if self._plan is not None:
                    return self._plan(self._runner.backend, batch, rows)
            with self._patches.applied():
                return self._runner.forward(batch, rows)

    @contextmanager
    def _thread_pool(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if self._threads in {None, before}:
            yield
            return
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def weight_bytes(model: torch.nn.Module) -> int:
    """Return what packed copies of all linears would take."""
    return sum(packed_bytes([one.weight]) for one in model.modules() if type(one) is torch.nn.Linear)


def find_patches(model: Any, *, packed: bool, exact: bool) -> Patches:
    """Return the replacements of ``model`` that equal what they replace, none where the whole does not."""
    if model.device.type != "cpu" or model.dtype not in {torch.float32, torch.bfloat16, torch.float16}:
        return Patches()
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.tensor([trial_tokens(_TRIAL_TOKENS, vocab_size)])
    observed = observe(model, tokens)
    patches = _pieces(model, observed, packed=packed, exact=exact)
    with patches.applied():
        logits = plain_logits(model, tokens)
    if not _equal(logits, observed.logits, exact=exact):
        _LOGGER.warning(
            "%s runs as it is: with faster parts, each of them equal to its own, its logits were others",
            type(model).__name__,
        )
        return Patches()
    return patches


def _pieces(model: Any, observed: Observed, *, packed: bool, exact: bool) -> Patches:
    accept, patches = Acceptance(model.dtype, exact=exact), Patches()
    ours = packing(model.dtype)
    # A half type's rounding hides what a product in float32 has done, but not always.
    pack = packed and ours is not None and (ours == model.dtype or not exact)
    try:
        load()
    except LibraryUnavailableError as error:
        _LOGGER.warning("linears, norms, gates and rotary embeddings go the slow way, by torch: %s", error)
    else:
        patch_rotary(patches, model, accept)
        if not exact:
            patch_norms(patches, list(observed.times_called), accept)
            patch_gates(patches, observed.called_once, accept, pack=pack)
    inside = {below for module in patches.forwards for below in module.children()}
    groups = [[one for one in group if one not in inside] for group in observed.siblings()]
    patch_linears(patches, [group for group in groups if group], accept, pack=pack)
    return patches


def _equal(actual: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> bool:
    """Compare within half the digits of the dtype, relative to the spread of the logits, as the runner's own door."""
    if exact:
        return torch.equal(actual, expected)
    allowed = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.max() - expected.min())
    return bool((actual.float() - expected.float()).abs().max() <= allowed)
