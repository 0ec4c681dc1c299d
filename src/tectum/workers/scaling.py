"""How many encoders the waiting work needs. Pure: it is told the time and the queue, and says a number."""

from __future__ import annotations

#: seconds that a queue must be too long before an encoder is added, and short enough before one is taken away: starting
#: one costs a model load, so it is given up slowly
GROW_AFTER, SHRINK_AFTER = 2.0, 60.0


class Scaler:
    """Between `least` and `most` encoders, one for each `patches` queued input patches."""

    def __init__(self, least: int, most: int, patches: int) -> None:
        self.least = least
        self.most = most
        self.patches = patches
        self._since: float | None = None  # since when the same change is wanted
        self._grows = False

    def wanted(self, running: int, queued_patches: int, now: float) -> int:
        """How many should run. It grows to what the queue needs at once, and shrinks one by one."""
        needed = min(max(-(-queued_patches // self.patches), self.least), self.most)
        if needed == running:
            self._since = None
            return running
        grows = needed > running
        if self._since is None or grows is not self._grows:
            self._since, self._grows = now, grows
        if now - self._since < (GROW_AFTER if grows else SHRINK_AFTER):
            return running
        self._since = None
        return needed if grows else running - 1
