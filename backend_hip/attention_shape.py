"""How attention is cut: splits of keys, heads and rows of a block. The kernels get it as defines.

SPLIT_KEYS is part of the arithmetic (kernels/attention.h): another one means another order of
additions. The rest changes only how fast a result comes.
"""

SPLIT_KEYS = 128
PARTIAL_EXTRA = 2  # floats beside a head's values in a split's partial result
LARGEST_HEAD = 512  # elements: 16 for each lane of a wave of 32

_HEADS_PER_BLOCK = 8
# Heads, padded to a power of two, times head size: what four waves mix in 16 KiB of shared memory,
# and the weights of a split, times the scale of each block of 32 values, in another 16 KiB.
_RESULTS_PER_BLOCK = 1024
_MERGED_PER_BLOCK = 2048  # rows times heads times head size, in 8 KiB
_MOST_ROWS = 16  # times heads


def passes(head_size: int, group: int) -> int:
    """Blocks that share the query heads of one KV head between them."""
    fitting = max(min(_HEADS_PER_BLOCK, _RESULTS_PER_BLOCK // head_size), 1)
    most = 1 << (fitting.bit_length() - 1)
    return -(-group // most)


def rows_per_block(head_size: int, group: int) -> int:
    """Consecutive rows of one sequence that a block serves with each key that it reads."""
    heads = -(-group // passes(head_size, group))
    return max(min(_MERGED_PER_BLOCK // (heads * head_size), _MOST_ROWS // padded(heads)), 1)


def padded(heads: int) -> int:
    """Heads of a block as the kernel lays their weights out: a power of two."""
    return 1 << (heads - 1).bit_length()


def defines(head_size: int, group: int) -> tuple[tuple[str, int], ...]:
    """What kernels/attention.h must be told beside the storage types and the head size."""
    return (
        ("GROUP", group),
        ("HEAD_PASSES", passes(head_size, group)),
        ("ROWS_PER_BLOCK", rows_per_block(head_size, group)),
        ("SPLIT_KEYS", SPLIT_KEYS),
    )


def splits_for(positions: int) -> int:
    """Splits that hold `positions` keys."""
    return -(-positions // SPLIT_KEYS)


def split_bucket(positions: int, context_length: int) -> int:
    """Splits of a grid for rows of up to `positions` keys: a power of two, so that a captured graph
    serves many steps, and no more than the context holds."""
    return min(1 << (splits_for(positions) - 1).bit_length(), splits_for(context_length))
