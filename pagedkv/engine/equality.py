"""When two greedy runs gave the same answer: the project's one rule for comparing tokens.

Takes two lists of token ids and, only where they part, the reference's own logits there; gives a verdict; refuses to
know how either list was made. Greedy decoding takes the largest logit, and float32 sums in another order move logits
by some 4e-5: where the reference itself holds two tokens apart by less than `TIE_GAP`, the order of additions decides,
and either token is right. Such a tie ends the comparison, since what follows is another text; ties are counted, and
more than one in `TOKENS_PER_TIE` tokens are too many to be chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

TIE_GAP: Final = 2e-4
TOKENS_PER_TIE: Final = 2000


@dataclass(frozen=True)
class TokenComparison:
    """One pair of token lists, compared.

    Attributes:
        num_tokens: tokens that were compared: up to and with the first difference, or all of them.
        first_difference: index of the first token that differs (one list ending early differs there), or None.
        tie: whether that difference is a tie of the reference.
        gap: the reference's top-2 logit gap at the difference, or None where there is none to ask.
    """

    num_tokens: int
    first_difference: int | None = None
    tie: bool = False
    gap: float | None = None

    @property
    def equal(self) -> bool:
        """Whether the lists are token-equal: identical, or parted by a tie."""
        return self.first_difference is None or self.tie


def compare_tokens(
    tokens: Sequence[int], reference: Sequence[int], logits_at: Callable[[int], torch.Tensor]
) -> TokenComparison:
    """Compare ``tokens`` with the ``reference`` run's.

    ``logits_at(i)`` returns the reference's logits, float ``[vocab]``, from which its token ``i`` was taken; it is
    called at most once, for the first difference. A list that ends before the other is a difference with no tie.
    """
    for index, (token, expected) in enumerate(zip(tokens, reference, strict=False)):
        if token != expected:
            top = logits_at(index).topk(2)
            gap = float(top.values[0] - top.values[1])
            tie = gap < TIE_GAP and {token, expected} == set(top.indices.tolist())
            return TokenComparison(index + 1, index, tie, gap)
    shorter = min(len(tokens), len(reference))
    if len(tokens) != len(reference):
        return TokenComparison(shorter + 1, shorter)
    return TokenComparison(shorter)


def too_many_ties(comparisons: Iterable[TokenComparison]) -> bool:
    """Whether ties are more than chance explains: over one in 2,000 compared tokens, one always allowed."""
    done = list(comparisons)
    return sum(comparison.tie for comparison in done) > max(1, sum(c.num_tokens for c in done) // TOKENS_PER_TIE)


def all_token_equal(comparisons: Iterable[TokenComparison]) -> bool:
    """Whether every pair is token-equal and the ties among them are rare enough to be ties."""
    done = list(comparisons)
    return all(comparison.equal for comparison in done) and not too_many_ties(done)
