"""What commands share: options, tokens, the engine's construction, progress, tables."""

import argparse
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend_hip.kv_types import KV_TYPES
from backend_hip.runtimes import DEVICES
from backend_hip.runtimes.checking import Checking, set_checking
from fixtures.faults import Change
from fixtures.registry import resolve_model
from reference.model import Model, check_tokens, load_model
from reference.model.errors import InputError
from suites.commands import planting
from suites.commands.progress import ProgressReport as ProgressReport
from suites.commands.tables import table as table
from suites.harness.patched import patched_engine

if TYPE_CHECKING:
    from backend_hip.engine import Engine
    from backend_hip.results import PrefillPair
    from backend_hip.switch import BatchedPrefill

DEFAULT_PROMPT = "The capital of France is"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a GGUF file, or a registered name: smollm2, gemma3-270m, tiny-qwen3, ...",
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--prompt", metavar="TEXT", help=f"prompt text (default: {DEFAULT_PROMPT!r})"
    )
    group.add_argument("--tokens", metavar="1,2,3", help="prompt as token ids, used as they are")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options that decide how an engine is built; names as in pytest's."""
    add_device(parser)
    planting.add_option(parser)
    parser.add_argument(
        "--path",
        default="kparallel",
        metavar="P",
        help="bundle of kernels: kparallel (bit-equal between prefill modes), serial, or "
        "matrix (the matrix unit, on halves; one token's K formats as bytes by digits) "
        "(default: kparallel)",
    )
    parser.add_argument(
        "--max-cols",
        type=int,
        default=40,
        metavar="N",
        help="columns per batched matrix product, 1 to 64 (default: 40); on path matrix of routed "
        "experts only",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        metavar="N",
        help="prompt tokens per command flow (default: --max-cols, 1024 on path matrix)",
    )
    add_kv(parser)
    add_checking(parser)


def add_checking(parser: argparse.ArgumentParser) -> None:
    """What the CPU runtime checks while the engine runs."""
    parser.add_argument(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run each launch in a seeded order of its threads and blocks, in the reverse, and "
        "interleaved; all must leave the same memory (cpu runtime only; default: off)",
    )
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="run stream work as late as HIP allows, so that what was not waited for is not there "
        "(cpu runtime only; default: off)",
    )


def checking_from(arguments: argparse.Namespace) -> Checking:
    """What the options ask for. InputError for a seed that is none, and for the reference, which
    has no launches to check."""
    checking = Checking(shuffle=arguments.shuffle, sanitize=arguments.sanitize)
    if checking.is_on and getattr(arguments, "side", "engine") == "reference":
        raise InputError(
            f"{checking.options}: --side is reference, expected engine because the checks are of "
            "its launches"
        )
    return checking


def add_kv(parser: argparse.ArgumentParser) -> None:
    for letter, word in (("k", "keys"), ("v", "values")):
        parser.add_argument(
            f"--kv-type-{letter}",
            default="f16",
            metavar="T",
            help=f"storage type of cached {word}: {', '.join(KV_TYPES)}, in the reference also "
            "q5_1, q5_0, q4_1, q4_0 (default: f16)",
        )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="auto, amd, cuda or cpu; auto takes the first present in this order (default: auto)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the result as JSON to FILE"
    )


def require_device(name: str) -> None:
    if name not in DEVICES:
        raise InputError(f"--device is {name!r}, expected one of {', '.join(DEVICES)}")


def require_writable(option: str, path: Path | None) -> None:
    """Refuses a target that can't be written before any work is done for it."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{option} is {path}, expected a file name because that is a folder")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{option} is {path}, expected a folder that exists")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise InputError(f"{option} is {path}, expected a place that can be written to")


def require_apart(option: str, path: Path | None, *inputs: Path) -> None:
    """Refuses to overwrite an input of the command."""
    for source in inputs:
        if path is not None and path.exists() and source.exists() and path.samefile(source):
            raise InputError(f"{option} is {path}, expected another file than the input {source}")


def open_model(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Model:
    path = resolve_model(arguments.model, progress=progress)
    for option in ("json", "out"):
        require_apart(f"--{option}", getattr(arguments, option, None), path)
    return planting.model_for(arguments, load_model(path))


def parse_tokens(text: str) -> list[int]:
    """Comma-separated token ids; InputError names what is no number."""
    tokens = []
    for part in text.split(","):
        try:
            tokens.append(int(part))
        except ValueError:
            raise InputError(
                f"--tokens has {part.strip()!r}, expected token ids such as 1,2,3"
            ) from None
    return tokens


def prompt_tokens(arguments: argparse.Namespace, model: Model, n_decode: int) -> list[int]:
    """The prompt's ids, checked against vocabulary and context."""
    if arguments.tokens is not None:
        tokens = parse_tokens(arguments.tokens)
    else:
        text = DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
        tokens = model.tokenizer.encode(text)
    context = model.spec.context_length
    check_tokens(tokens, model.spec, context)
    if len(tokens) + n_decode > context:
        raise InputError(
            f"-n is {n_decode}, expected at most {context - len(tokens)} because {len(tokens)} "
            f"prompt tokens and the new ones must fit into a context of {context}"
        )
    return tokens


def context_for(model: Model, positions: int) -> int:
    """Context length of an engine that must hold `positions`: its default, or more if needed."""
    from backend_hip.engine_options import DEFAULT_CONTEXT

    return min(model.spec.context_length, max(DEFAULT_CONTEXT, positions))


def open_engine(
    arguments: argparse.Namespace,
    model: Model,
    positions: int,
    progress: Callable[[str], None],
    *,
    sequences: int = 1,
    batched_prefill: "BatchedPrefill" = "on",
    judge: "Callable[[PrefillPair], Any] | None" = None,
) -> "Engine":
    """Opens the device, sets what it checks, builds the engine. Loads the HIP runtime.

    Raises Unsupported for --shuffle or --sanitize on another runtime than the CPU's.
    """
    from backend_hip.device import open_device

    device = open_device(arguments.device, progress=progress)
    set_checking(checking_from(arguments))
    open_copy, make = planting.engine_of(arguments)
    if open_copy is not open_device:
        device = open_copy(arguments.device)
    engine: Engine = make(
        model,
        device,
        **engine_options(arguments, model, positions),
        sequences=sequences,
        batched_prefill=batched_prefill,
        judge=judge,
        progress=progress,
    )
    return engine


@dataclass
class EngineOpener:
    """Opens an engine when a judge asks for one, and remembers which runtime it runs on.

    It holds as many sequences as the check of decode batches wants: they cost memory for caches and
    states only.
    """

    arguments: argparse.Namespace
    model: Model
    positions: int
    progress: Callable[[str], None]
    label: str = "none"

    def __call__(self) -> "Engine":
        from suites.benchmark.byte_model import kv_nbytes_per_token, state_nbytes
        from suites.harness.batch_plans import sequences_of

        # As if of float16: the types that were asked for may be none, which the engine refuses.
        spec, asked = self.model.spec, self.arguments.sequences
        kv_nbytes = context_for(self.model, self.positions) * kv_nbytes_per_token(
            spec, "f16", "f16"
        )
        held = sequences_of(self.arguments.path, kv_nbytes + state_nbytes(spec))
        engine = open_engine(
            self.arguments,
            self.model,
            self.positions,
            self.progress,
            sequences=held if asked is None else asked,
        )
        self.label = engine.device.label
        return engine

    @contextmanager
    def copy(self, changes: Sequence[Change]) -> Iterator[Any]:
        """A fresh engine of the same options, made of changed sources, on the same device."""
        fault = planting.planted(self.arguments)
        before = () if fault is None else fault.changes
        options = engine_options(self.arguments, self.model, self.positions)
        with (
            patched_engine((*before, *changes)) as copied,
            copied.open_device(self.arguments.device) as device,
            copied.engine(self.model, device, **options, progress=self.progress) as engine,
        ):
            yield engine


def engine_options(arguments: argparse.Namespace, model: Model, positions: int) -> dict[str, Any]:
    """What the options of `add_engine` say to an engine's constructor."""
    return {
        "max_cols": arguments.max_cols,
        "chunk": arguments.chunk,
        "path": arguments.path,
        "kv_type_k": arguments.kv_type_k,
        "kv_type_v": arguments.kv_type_v,
        "context_length": context_for(model, positions),
    }


_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """The text with what could steer a terminal escaped: controls other than newline and tab."""

    def shown(character: str) -> str:
        steers = unicodedata.category(character) in ("Cc", "Cs") or character in _BIDI
        if not steers or character in "\n\t":
            return character
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")

    return "".join(map(shown, text))


def prefill_switch(asked: "tuple[str, ...] | None") -> "BatchedPrefill | None":
    """The switch of the environment; InputError where `asked` (--prefill) contradicts it."""
    from backend_hip.switch import VARIABLE, mode_from_environment

    switch = mode_from_environment()
    if switch == "off" and asked is not None and "batched" in asked:
        raise InputError(
            f"--prefill is {','.join(asked)}, expected per-token because {VARIABLE} is 0 "
            "(batched prefill off)"
        )
    return switch
