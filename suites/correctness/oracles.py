"""The models with recorded logits, by their registry names, as tests take them as parameters."""

from fixtures.golden import TINY_GATES, GoldenModel, golden_model
from fixtures.registry import ORACLE_PREFIX

ORACLES = tuple(f"{ORACLE_PREFIX}{name}" for name in TINY_GATES)


def golden_name(model: str) -> str:
    """The golden's own name of a registry name: "llama" of "oracle-llama"."""
    return model.removeprefix(ORACLE_PREFIX)


def golden_of(model: str) -> GoldenModel:
    """The recording of an oracle model. Raises InputError for a model without one."""
    return golden_model(golden_name(model))
