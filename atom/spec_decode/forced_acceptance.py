"""A forced mean acceptance length, for load tests that shall not depend on the text.

A length of 2.32 means 2.32 tokens a step: the token that is always kept, and 1.32 accepted drafts.
Each step accepts the whole number of drafts below or above that, here 1 in 68% of a request's steps
and 2 in 32%, which no other choice of whole numbers with this mean undercuts in variance. Which of
the two it is follows a fixed rhythm and not a draw: after ``n`` steps a request was given
``floor(1.32 n + phase)`` drafts, so its mean is never more than one draft in all beside the
setting. Phases differ from request to request and fill the interval evenly, so that a batch as a
whole keeps the mean in every step too.

A step that verifies fewer drafts than that accepts those that it has. The rest is not made up for:
with lengths that vary (DSpark) the mean is then lower than the setting.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from fractions import Fraction
from itertools import pairwise

from atom.errors import BadInput

#: 2**32 over the golden ratio: multiples of it fill the interval evenly
_GOLDEN = 2654435769
_WHOLE = 2**32


class ForcedAcceptance:
    """Gives the drafts that each step of each request accepts.

    Args:
        length: mean tokens a step, 1 to ``1 + draft_tokens``. Taken as the decimal it is written
            as, so that 2.32 is 58/25 and the rhythm is exact.
        draft_tokens: drafts of a step.

    Raises:
        BadInput: a length that no acceptance of so many drafts can have.
    """

    def __init__(self, length: float, draft_tokens: int) -> None:
        if not math.isfinite(length) or not 1 <= length <= 1 + draft_tokens:
            raise BadInput(
                f"forced acceptance length {length}: a step with {draft_tokens} draft tokens gives "
                f"1 to {1 + draft_tokens} tokens; choose a length in that range or more drafts"
            )
        bonus = Fraction(repr(float(length))) - 1
        self._numerator, self._denominator = bonus.numerator, bonus.denominator
        self._steps: dict[Hashable, tuple[int, int]] = {}
        self._seen = 0

    @property
    def mean_bonus(self) -> float:
        """Mean accepted drafts a step."""
        return self._numerator / self._denominator

    def next_bonus(self, request: Hashable, drafts: int) -> int:
        """Drafts that the request's next step accepts; every call is one step.

        Args:
            request: which one; unknown ones begin their rhythm.
            drafts: drafts that the step verifies.
        """
        step, phase = self._steps.get(request, (0, -1))
        if phase < 0:
            phase = self._denominator * (self._seen * _GOLDEN % _WHOLE) // _WHOLE
            self._seen += 1
        self._steps[request] = (step + 1, phase)
        before = (step * self._numerator + phase) // self._denominator
        after = ((step + 1) * self._numerator + phase) // self._denominator
        return min(after - before, max(drafts, 0))

    def upcoming(self, request: Hashable, drafts: int, steps: int) -> list[int]:
        """What so many calls of :meth:`next_bonus` would give a request whose rhythm has begun."""
        step, phase = self._steps[request]
        start, num, den = step * self._numerator + phase, self._numerator, self._denominator
        sums = [(start + number * num) // den for number in range(steps + 1)]
        most = max(drafts, 0)
        return [min(after - before, most) for before, after in pairwise(sums)]

    def skip(self, request: Hashable, steps: int) -> None:
        """Count so many steps of a request whose rhythm has begun."""
        step, phase = self._steps[request]
        self._steps[request] = (step + steps, phase)

    def forget(self, request: Hashable) -> None:
        """A request ended. Its identity may be used again, for a new rhythm."""
        self._steps.pop(request, None)
