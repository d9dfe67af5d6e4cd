"""What surrounds attention in a model step, made cheaper without touching the model: see `runner`.

Takes a transformers model on the CPU; gives a runner whose forward passes run on packed weights, one product for
sibling linears, and single C calls for norms, gates and rotary embeddings. Each replacement is found by structure and
by watching one forward pass, is accepted only if it equals what it replaces, and stands during a forward pass only.
"""

from pagedkv.engine.model_step.runner import FastRunner

__all__ = ["FastRunner"]
