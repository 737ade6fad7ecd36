"""Which edits a job makes in which of its steps. Pure Python, no torch; the model thread.

0 ............... base ..................... len(tokens)
history's edits   | those kept of a replayed tail, then the request's interventions
"""

from collections.abc import Mapping, Sequence

from sessions.edits import Intervention, StepEdits, edits_at


class Edits:
    """Edits by position: those `known`, and of `interventions` from `base` on."""

    def __init__(
        self,
        known: Mapping[int, StepEdits],
        interventions: Sequence[Intervention] = (),
        *,
        base: int,
    ) -> None:
        self._known = known
        self._interventions = interventions
        self._base = base
        self._found: dict[int, StepEdits] = {}  # each step's are asked for several times

    @property
    def are_new(self) -> bool:
        """Whether a request makes some, and not history alone."""
        return bool(self._interventions)

    def __bool__(self) -> bool:
        return bool(self._known or self._interventions)

    def at(self, position: int) -> StepEdits:
        """The edits of one step, in their order."""
        known = self._known.get(position, ())
        if position < self._base or not self._interventions:
            return known
        if position not in self._found:
            self._found[position] = known + edits_at(self._interventions, position)
        return self._found[position]

    def between(self, positions: range) -> dict[int, StepEdits]:
        """The edited ones of some steps, by position."""
        if not self:
            return {}
        return {position: made for position in positions if (made := self.at(position))}
