"""Which sequences decode together before the judge: their prompts, and the rows of each step.

Path matrix runs another kernel for each number of tiles of columns, and gives a column the same
bits beside any others only within one. So there a sequence's tokens go in flows of as many tiles as
the step has rows. Exact paths give the same bits whatever the numbers are.
"""

from dataclasses import dataclass

from backend_hip.registry import MATRIX_TILES, PACKED_TILE
from suites.harness.pair import is_exact
from suites.harness.verdict import counted

SEQUENCES = 3
"""What a judged engine holds: the fewest that put a column alone behind a full group of two, the
smallest group that a kernel keeps in shared memory. More cost nothing but KV memory."""
MANY = PACKED_TILE + 1
"""Sequences that put a row into a second tile of the matrix unit. An engine of path matrix holds
them where that takes at most MANY_NBYTES of KV cache."""
MANY_NBYTES = 2**30
_STRIDE = 11  # between lengths of prompts, and without a factor in common with their range


@dataclass(frozen=True)
class Plan:
    """Prompts and steps. `lengths` are of the prompts, by sequence: other positions for every row.

    `orders` has the sequences of each step by row. Of the last step, which is production's, only
    the next tokens are read back. `flow` bounds the tokens that are fed at once; with `one_flow` a
    sequence alone is fed prompt and steps at once.
    """

    lengths: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    flow: int | None = None
    one_flow: bool = False

    @property
    def rows(self) -> int:
        """Of the widest step."""
        return len(self.lengths)

    @property
    def steps(self) -> int:
        return len(self.orders)

    @property
    def longest(self) -> int:
        """Positions that a sequence takes at most."""
        return max(self.lengths) + self.steps

    def described(self, room: int) -> str:
        """What it covers, where a sequence has `room` positions."""
        sequences, steps = counted(self.rows, "sequence"), counted(self.steps, "common step")
        return f"{sequences}, {steps}, up to {min(self.longest, room)} positions"

    def why_not(self, held: int, room: int) -> str:
        """Why an engine of so many sequences and positions can't run it; empty where it can."""
        if held < self.rows:
            return f"the engine holds {counted(held, 'sequence')}"
        if room < self.longest:
            return f"they need a context of {self.longest}, it is {room}"
        return ""


def few(prompt_tokens: int, path: str) -> Plan:
    """Three sequences, the longest of the judged prompt's length: positions behind the first tile.

    No sequence stands in the row of its number in the first step; the others are of parts.
    """
    lengths = (7, 2, max(PACKED_TILE + 5, prompt_tokens))
    flow = None if is_exact(path) else PACKED_TILE
    return Plan(lengths, ((2, 0, 1), (0, 2), (2, 1)), flow)


def wide_rows(path: str, held: int) -> int:
    """Rows of a wide step: all that the engine holds, on path matrix at least of two tiles."""
    return max(held, MANY) if path == "matrix" else held


def many(rows: int, path: str) -> Plan | None:
    """As many sequences as the engine holds; None where `few` has them all.

    Exact paths also get a step of half the rows, for which there may be another kernel.
    """
    if rows <= SEQUENCES:
        return None

    def turned(by: int) -> tuple[int, ...]:
        return tuple((row + by) % rows for row in range(rows))

    first, last = turned(1), turned(rows - 2)
    if is_exact(path):
        lengths = tuple(1 + _STRIDE * sequence % (PACKED_TILE - 2) for sequence in range(rows))
        return Plan(lengths, (first, turned(2)[: rows // 2], last))
    tiles = (1, *MATRIX_TILES)  # one token is a product of its own
    most = next(tile for tile in tiles if tile >= rows)
    shortest = 1 + max(tile for tile in tiles if tile < most)
    room = most - 1 - shortest  # for other lengths, with two steps behind each
    lengths = tuple(shortest + _STRIDE * sequence % room for sequence in range(rows))
    return Plan(lengths, (first, last), one_flow=True)


def sequences_of(path: str, kv_nbytes: int) -> int:
    """How many sequences a judged engine holds, of `kv_nbytes` of KV cache each."""
    return MANY if path == "matrix" and MANY * kv_nbytes <= MANY_NBYTES else SEQUENCES
