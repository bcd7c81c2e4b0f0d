"""How long a run may begin new things, and what there was no time for."""

import time
from dataclasses import dataclass, field


@dataclass
class Deadline:
    """Begins when it is made. `minutes` None: no end."""

    minutes: float | None = None
    left_out: list[str] = field(default_factory=list)
    _began: float = field(default_factory=lambda: time.monotonic())

    def allows(self, what: str) -> bool:
        """True while there is time to begin `what`; else it is noted as left out."""
        if self.minutes is None or time.monotonic() - self._began <= self.minutes * 60:
            return True
        self.left_out.append(what)
        return False
