"""What a caller may ask for: sampling parameters and prompts, checked at the door."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.engine import SamplingParams
from pagedkv.engine.checks import require_token_ids


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temperature", -0.1, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", float("inf"), ValueError),
        ("temperature", "hot", TypeError),
        ("temperature", True, TypeError),
        ("top_p", -1e-9, ValueError),
        ("top_p", 1.0001, ValueError),
        ("top_p", None, TypeError),
        ("max_new_tokens", 0, ValueError),
        ("max_new_tokens", -3, ValueError),
        ("max_new_tokens", 1.5, TypeError),
        ("max_new_tokens", True, TypeError),
        ("seed", -1, ValueError),
        ("seed", 2**64, ValueError),
        ("seed", 0.5, TypeError),
        ("stop_token_ids", [-1], ValueError),
        ("stop_token_ids", [1.0], TypeError),
        ("stop_token_ids", [True], TypeError),
        ("stop_token_ids", "ab", TypeError),
        ("stop_token_ids", 3, TypeError),
        ("ignore_eos", 1, TypeError),
    ],
)
def test_bad_parameters_are_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    """A value out of range or of the wrong type is refused at construction, naming the parameter."""
    with pytest.raises(error, match=name):
        SamplingParams(**{name: value})


def test_unknown_parameters_are_refused() -> None:
    """A misspelt parameter is an error, never ignored."""
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("given", [{"top_p": 0}, {"top_p": 1e-9}, {"temperature": 1e6}, {"temperature": 1e-300}])
def test_edge_values_are_legal(given: dict[str, float]) -> None:
    """The ends of each range are inside it."""
    params = SamplingParams(**given)  # type: ignore[arg-type]

    assert {name: getattr(params, name) for name in given} == given


def test_parameters_are_kept_in_plain_types() -> None:
    """Integers and sequences of other libraries become ints and a tuple, so that params can be compared and hashed."""
    params = SamplingParams(max_new_tokens=np.int64(4), stop_token_ids=torch.tensor([1, 2]), seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]

    assert params == SamplingParams(max_new_tokens=4, stop_token_ids=(1, 2), seed=2**64 - 1)
    assert hash(params) == hash(SamplingParams(max_new_tokens=4, stop_token_ids=(1, 2), seed=2**64 - 1))
    assert type(params.max_new_tokens) is int


@pytest.mark.parametrize(
    "prompt", [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2], dtype=np.int32), torch.tensor([3, 1, 2]), [np.int64(3), 1, 2]]
)
def test_prompts_come_in_many_shapes(prompt: Any) -> None:
    """Lists, tuples, 1-D arrays and tensors of integers are the same prompt, as a new list of ints."""
    tokens = require_token_ids("prompt", prompt, 4)

    assert tokens == [3, 1, 2]
    assert {type(token) for token in tokens} == {int}
    assert tokens is not prompt


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([0, -1], ValueError, r"prompt\[1\] must be 0 to 9, was -1"),
        ([10], ValueError, r"prompt\[0\] must be 0 to 9, was 10"),
        ([True], TypeError, r"prompt\[0\] must be an integer, was True"),
        ([np.bool_(True)], TypeError, r"prompt\[0\] must be an int"),
        ([1.0], TypeError, r"prompt\[0\] must be an integer, was 1.0"),
        ([[1, 2]], TypeError, r"prompt\[0\] must be an int"),
        ("text", TypeError, "prompt must be a list of token ids, was str"),
        (b"text", TypeError, "prompt must be a list of token ids, was bytes"),
        (7, TypeError, "prompt must be a list of token ids, was int"),
        ({1: 2}, TypeError, "prompt must be a list of token ids, was dict"),
        (torch.tensor([[1, 2]]), TypeError, r"prompt must be 1-D and of an integer dtype, was \(1, 2\)"),
        (torch.tensor([1.0]), TypeError, "integer dtype"),
        (torch.tensor([True]), TypeError, "integer dtype"),
        (np.array([1.0]), TypeError, "integer dtype"),
        (np.array([True]), TypeError, "integer dtype"),
    ],
)
def test_what_is_no_token_id_is_refused(prompt: Any, error: type[Exception], message: str) -> None:
    """The message names the argument, the place, what it must be and what it was (vllm#7632, #27987)."""
    with pytest.raises(error, match=message):
        require_token_ids("prompt", prompt, 10)
