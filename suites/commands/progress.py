"""Progress on standard error: a line with a bar on a terminal, else one line per stage."""

import re
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

# "layer 3 of 30", "512 of 4792 MiB": what is done, what there is to do, and what follows.
_COUNT = re.compile(r"(\d+)(?: of |/)(\d+).*")


class ProgressReport:
    """Takes one line of text at a time; a count in it, "3 of 30", becomes a bar on a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._stage = ""

    def __enter__(self) -> "ProgressReport":
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, text: str) -> None:
        if self._bar is not None:
            count = _COUNT.search(text)
            # Without a total the bar is empty: how long this stage takes is not known.
            done, total = (int(count[1]), int(count[2])) if count else (0, 1)
            task = self._bar.task_ids[0]
            self._bar.update(task, description=text, completed=done, total=total)
            return
        # Counted steps are one stage; only its first line is printed.
        stage = _COUNT.sub("", text)
        if stage != self._stage:
            self._stage = stage
            print(f"  {text}", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        """A line that stays, on standard error."""
        self._console.print(text, markup=False, soft_wrap=True)
