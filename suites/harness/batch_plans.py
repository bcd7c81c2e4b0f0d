"""Which sequences decode together before the judge: their prompts, and the rows of each step.

Path matrix runs another kernel for each number of tiles of columns, and gives a column the same
bits beside any others only within one. So there a sequence's tokens go in flows of as many tiles as
the step has rows. Exact paths give the same bits whatever the numbers are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from backend_hip.attention_shape import SPLIT_KEYS
from backend_hip.registry import FEW_COLUMNS, MATRIX_TILES, PACKED_MOST, PACKED_TILE
from suites.harness.pair import is_exact
from suites.harness.verdict import counted

NAME = "batched decode"
"""Of the check that these plans are for."""
SEQUENCES = 3
"""What a judged engine holds: the fewest that put a column alone behind a full group of two, the
smallest group that a kernel keeps in shared memory."""
MANY = PACKED_TILE + 1
"""Sequences that put a row into a second tile of the matrix unit. An engine of path matrix holds
them where their caches and states take at most MANY_NBYTES."""
MANY_NBYTES = 2**30
LONGEST = 2 * SPLIT_KEYS + 1
"""Tokens of the longest prompt: three splits of keys, beside prompts of one."""
TURN = 2
"""Tokens of the second turn."""
_STRIDE = 11  # between lengths of prompts, and without a factor in common with their range


@dataclass(frozen=True)
class Plan:
    """Prompts and steps. `lengths` are of the prompts, by sequence: other positions for every row.

    `orders` has the sequences of each step by row, `production` those of steps of which only the
    next tokens are read back. Behind them each sequence is fed `turn` tokens as a prompt. `flow`
    bounds the tokens that are fed at once; with `one_flow` a sequence alone is fed prompt and steps
    at once.
    """

    lengths: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    production: tuple[tuple[int, ...], ...]
    turn: int = 0
    flow: int | None = None
    one_flow: bool = False

    @property
    def rows(self) -> int:
        """Of the widest step."""
        return len(self.lengths)

    @property
    def steps(self) -> int:
        return len(self.orders) + len(self.production)

    @property
    def longest(self) -> int:
        """Positions that a sequence takes at most."""
        return max(length + self.behind(i) for i, length in enumerate(self.lengths))

    def behind(self, sequence: int) -> int:
        """Tokens that a sequence is fed behind its prompt, in steps and in a second turn."""
        orders = (*self.orders, *self.production)
        return sum(sequence in order for order in orders) + self.turn

    def described(self, room: int) -> str:
        """What it covers, where a sequence has `room` positions."""
        sequences, steps = counted(self.rows, "sequence"), counted(self.steps, "step")
        return f"{sequences}, {steps}, up to {min(self.longest, room)} positions"


def plans_of(path: str, held: int, prompt_tokens: int) -> list[Plan]:
    """What an engine of `held` sequences is judged by, narrow steps first.

    On path matrix more rows than packed products take run other kernels than fewer.
    """
    plans = [few(prompt_tokens, path)]
    if held <= SEQUENCES:
        return plans
    if not is_exact(path) and held > PACKED_MOST:
        plans.append(many(PACKED_MOST, path))
    return [*plans, many(held, path)]


def few(prompt_tokens: int, path: str) -> Plan:
    """Three sequences, one of the judged prompt's length up to LONGEST, and behind the first tile.

    The longest lies between the others: where it fills its context, its last position is beside
    another's first. No sequence stands in the row of its number in the first step, each in the
    second. Steps of two come without the longest and with it: in two buckets of splits where it has
    more than one. One alone runs the kernels of kparallel, which exact paths promise the same bits
    of.
    """
    lengths = (7, min(max(PACKED_TILE + 5, prompt_tokens), LONGEST), 2)
    together = ((1, 2, 0), (0, 1, 2), (2, 0), (0, 1))
    if is_exact(path):
        return Plan(lengths, (*together, (2,)), ((1, 2), (2,)), TURN)
    return Plan(lengths, together, ((1, 2),), TURN, PACKED_TILE)


def many(rows: int, path: str) -> Plan:
    """Steps of so many rows, and on exact paths of as many as other kernels take, and one less."""

    def turned(by: int, width: int = rows) -> tuple[int, ...]:
        return tuple((row + by) % rows for row in range(width))

    first, last = turned(1), turned(rows - 2)
    if is_exact(path):
        widths = {width - less for width in FEW_COLUMNS for less in (0, 1)}
        parts = (turned(2 + width, width) for width in sorted(widths) if width < rows)
        lengths = tuple(1 + _STRIDE * sequence % (PACKED_TILE - 2) for sequence in range(rows))
        return Plan(lengths, (first, *parts), (last,))
    tiles = (1, *MATRIX_TILES)  # one token is a product of its own
    most = next(tile for tile in tiles if tile >= rows)
    shortest = 1 + max(tile for tile in tiles if tile < most)
    room = most - 1 - shortest  # for other lengths, with two steps behind each
    lengths = tuple(shortest + _STRIDE * sequence % room for sequence in range(rows))
    return Plan(lengths, (first,), (last,), one_flow=True)


def sequences_of(path: str, nbytes: int) -> int:
    """How many sequences a judged engine holds, of `nbytes` of cache and states each."""
    return MANY if path == "matrix" and MANY * nbytes <= MANY_NBYTES else SEQUENCES


def made_of(tokens: Sequence[int], length: int, shift: int, vocabulary: int) -> tuple[int, ...]:
    """A prompt of `length` tokens made of another, moved up by `shift` and once more each time that
    it is repeated."""
    count = len(tokens)
    return tuple((tokens[i % count] + shift + i // count) % vocabulary for i in range(length))
