"""Records what the NumPy reference decodes, for machines that should not have to run it.

    python -m suites.correctness.greedy_reference smollm2 gemma3-270m

Takes minutes a model: every step runs the float64 reference and those that its limit is made of.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from fixtures.golden import PUBLISHED, published_model
from fixtures.greedy import GreedyRecord
from fixtures.registry import resolve_model
from reference.model import Model, load_model
from reference.model.sampling import argmax
from suites.harness.endtoend import References

STEPS = 64
KV_TYPE = "f16"


def record_of(model: Model, name: str, steps: int) -> GreedyRecord:
    """`steps` tokens after the recorded prompt of a published model."""
    golden = published_model(name)
    references = References(model, KV_TYPE, KV_TYPE)
    fed: Sequence[int] = golden.ids
    tokens, margins, limits = [], [], []
    for step in range(steps):
        expected = references.feed(fed)
        row = expected.logits[-1]
        second, best = np.partition(row, -2)[-2:]
        tokens.append(argmax(row))
        margins.append(float(best - second))
        limits.append(float(expected.limits[-1]))
        fed = tokens[-1:]
        print(f"{name}: step {step + 1} of {steps}", file=sys.stderr)
    return GreedyRecord(
        name, golden.sha256, golden.ids, KV_TYPE, tuple(tokens), tuple(margins), tuple(limits)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=PUBLISHED, metavar="NAME")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N")
    arguments = parser.parse_args()
    for name in arguments.models:
        model = load_model(resolve_model(name))
        print(record_of(model, name, arguments.steps).store())


if __name__ == "__main__":
    main()
