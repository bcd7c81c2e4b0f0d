"""Words for what is not an op of the forward pass, and for what a verdict has ruled out."""

import re
from collections.abc import Callable, Sequence

from suites.harness.verdict import Check, State, Verdict, counted

Holds = Callable[[str], bool]


def nothing(verdict: Verdict) -> str:
    checked = counted(len(verdict.checks), "check")
    return f"There is nothing to bisect: all {checked} of validate are ok."


def unsupported(verdict: Verdict) -> str:
    return f"There is nothing to bisect, because nothing ran: {verdict.summary()}."


AGAIN = (
    "These figures are of a second run, in an engine of its own: its tokens and stamps need not be "
    "those of the verdict."
)

DEVICE_REPORT = re.compile(
    r"kernel (?P<kernel>\S+) \(launch (?P<launch>\d+)\)"
    r"(?:, block (?P<block>\([^)]*\)), thread (?P<thread>[^:]*))?: (?P<cause>.*)"
)
LAST_QUEUED = re.compile(r"^(?P<call>\w+) \(last kernel queued: (?P<kernel>[^)]*)\): (?P<cause>.*)")


def device(error: str, stage: str) -> list[str]:
    """A run that a device error ended: kernel, launch, block and thread, cause; in which stage."""
    text = " ".join(error.split())
    lines = [
        "The device failed before the run was done, so nothing is said about what it computed."
    ]
    report, queued = DEVICE_REPORT.search(text), LAST_QUEUED.search(text)
    if report is not None:
        place = f"kernel {report['kernel']}, launch {report['launch']}"
        if report["block"] is not None:
            place += f", block {report['block']}, thread {report['thread']}"
        lines.append(f"It reports {place}: {report['cause']}.")
    elif queued is not None:
        lines.append(
            f"It reports no kernel; {queued['call']} saw it, and the last kernel queued before was "
            f"{queued['kernel']}: {queued['cause']}."
        )
    else:
        lines.append(f"It reports: {text}.")
    if stage:
        lines.append(f"The last stage that had begun is: {stage.removeprefix('bisect: ')}.")
    return lines


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


AT_POSITION = re.compile(r"\bis at position \d+|\bposition (\d+) and (\d+)")


def wrong_positions(verdict: Verdict) -> bool:
    """True where a check says that the engine stood at another position than it should."""
    return any(
        check.state is not State.OK and AT_POSITION.search(check.detail)
        for check in verdict.checks
        if check.name.startswith(("prefill pair: two modes", "sampler tail: "))
    )


def right_position(verdict: Verdict) -> str:
    count = len(verdict.run["tokens"])
    return (
        f"After a reset and {counted(count, 'token')} the position must be {count}: look at what "
        "resets it and what advances it."
    )


def how(mode: str, tokens: int, prompt: int) -> str:
    """ "batched prefill of 15 tokens", or what replays decoded tokens after the prompt's."""
    if tokens <= prompt:
        return f"{mode} prefill of {counted(tokens, 'token')}"
    return (
        f"replay of {prompt} prompt and {tokens - prompt} decoded tokens as one {mode} prefill "
        f"({tokens} tokens)"
    )


def _local_head(mode: str, modes: Sequence[str]) -> str:
    """What the names of a mode's local checks begin with: the last mode's are not named."""
    return "local" if mode == modes[-1] else f"local, {mode}"


def both_modes(verdict: Verdict, modes: Sequence[str], broken: Check) -> bool:
    """True where the other prefill mode breaks at the point that `broken` names, by its own op."""
    head, _, op = broken.name.partition(": ")
    heads = [_local_head(mode, modes) for mode in modes]
    others = {f"{other}: {op}" for other in heads if other != head}
    point = broken.link.partition(" ")[0]
    return head in heads and any(
        check.name in others
        and check.state is State.DIVERGED
        and check.link.partition(" ")[0] == point
        for check in verdict.checks
    )


def proves_nothing(broken: Check, verdict: Verdict) -> list[str]:
    """Why a run can't prove anything, and what to look at."""
    lines = [f"The run proves nothing: {_said(broken)}."]
    name = broken.name
    if name == "prefill pair: routes differ":
        lines.append(
            "Batched prefill launched no batched kernel of its own, so what was compared is one "
            "route with itself. No kernel is to blame: look at what chooses the prefill mode (the "
            "switch, the entry point, the gate in front of the dispatcher)."
        )
    elif name.startswith("kernels:"):
        lines.append(
            "The kernels that multiplied are not those of the path and formats that were asked "
            "for: look at the dispatch (path, format, column count), not at arithmetic."
        )
    elif name == "prefill pair: two modes of one prompt" and wrong_positions(verdict):
        lines.append(right_position(verdict))
    elif name == "prefill pair: separate results":
        lines.append("The two modes handed over one buffer or one generation: look at who owns it.")
    elif name == "prefill pair: no poison left":
        lines.append(
            "Some logits still hold the poison that was written before the run: part of the output "
            "projection's rows was never launched or never stored."
        )
    elif name == "planted faults are caught":
        lines.append("The judge itself missed a fault planted in a copy, so its ok means nothing.")
    return lines


def state(broken: Check, *, again: bool = False) -> list[str]:
    """Keys and values, or a recurrent state, that are not what was recorded.

    `again`: the figures of a second run follow, so the verdict's own are left out.
    """
    what = broken.link if again else _said(broken)
    lines = [f"What the sequence leaves behind is wrong: {what}."]
    if broken.name.endswith("kv_write"):
        lines.append(
            "Every op up to the keys and values is right; what the cache holds is not what was "
            "recorded before the write, rounded to the storage type: look at the write's slot, "
            "stride and rounding."
        )
    else:
        lines.append("The recurrence's result is right and the state that it keeps is not.")
    return lines


def entry(broken: Check) -> list[str]:
    """An entry of generation that does not give what the judged ones gave."""
    return [
        f"What generation calls differs from what was judged: {_said(broken)}.",
        "The judged prefills and decode steps hold, so look at the entry itself first: what it is "
        "fed, what it returns, and where its position starts.",
    ]


def batch(broken: Check) -> list[str]:
    """A sequence that decodes otherwise beside others than alone."""
    return [
        f"A sequence is right alone and wrong beside others: {_said(broken)}.",
        "Look at what a common step does by row: the kernels for few columns, and each row's "
        "position, cache start, recurrent state, logits and staging.",
    ]


def bits(broken: Check) -> list[str]:
    """Two runs that must have equal bits."""
    what = f"Every op is within its own limit, but {_said(broken)}."
    if broken.name.startswith("eager per-token"):
        return [
            what,
            "Traced, the per-token prefill launches each kernel itself; untraced, it replays one "
            "captured graph. Look at what was captured that changes with the step (position, "
            "token, address), and at which graph is replayed.",
        ]
    if broken.name.startswith("eager"):
        return [
            what,
            "A trace waits after every op and reads each value; without it nothing waits. Look at "
            "what is not synchronised, and at what else differs between the two runs.",
        ]
    if broken.name.startswith("decode equals"):
        return [
            what,
            "Decoding replays one graph a token: look at what it reads that changes with the step "
            "(position, token, cache address).",
        ]
    return [what, "The kparallel path promises equal bits whatever the number of columns."]


def logits(broken: Check) -> list[str]:
    """Logits or routing that no op accounts for."""
    return [f"{capital(_said(broken))}."]


def decode_alone(verdict: Verdict) -> list[str]:
    """A decode step is wrong where a prefill of the same tokens is right."""
    lines = [
        "So it is decoding alone that is wrong: its graph is replayed once a token, and what "
        "changes with the step is read from device memory (token, position, stamp)."
    ]
    for check in verdict.checks:
        if check.name.startswith("decode equals") and check.state is State.DIVERGED:
            lines.append(f"{capital(_said(check))}.")
            break
    return lines


def gone(broken: Check) -> list[str]:
    return [
        f"Validate saw a broken link, but it did not come again in a second run: {broken.link}.",
        "A fault that comes and goes points at what is not synchronised.",
    ]


def _said(check: Check) -> str:
    """The check's own words, with its place and figures."""
    place, bracket, rest = check.where.partition(" [")
    # The link may end with the tensor that the place begins with.
    where = f"at [{rest}" if bracket and check.link.endswith(place) else check.where
    parts = [check.link]
    parts += [text for text in (where, check.detail) if text and text not in check.link]
    return "; ".join(dict.fromkeys(parts))


def _op(name: str) -> bool:
    head, _, op = name.partition(": ")
    return head.startswith("local") and op not in ("kv_write", "recurrent state")


GROUPS: tuple[tuple[str, Holds], ...] = (
    ("every op of the forward pass on the inputs that it read", _op),
    ("the KV write", lambda name: name.endswith(": kv_write")),
    ("the recurrent state", lambda name: name.endswith(": recurrent state")),
    ("the logits against the reference", lambda name: name.startswith("logits: ")),
    (
        "the logits of both prefill modes against each other",
        lambda name: name == "prefill pair: last-token logits",
    ),
    ("equal KV contents of both modes", lambda name: name == "prefill pair: KV contents"),
    (
        "that both modes took routes of their own",
        lambda name: name == "prefill pair: routes differ",
    ),
    ("which kernels multiplied", lambda name: name.startswith("kernels: ")),
    ("graph replay against eager runs", lambda name: name.startswith("eager ")),
    ("decoding against a prefill", lambda name: name.startswith("decode equals ")),
    (
        "the sampler tail of the prefills",
        lambda name: name.startswith("sampler tail: ") and name.endswith("prefill"),
    ),
    ("the sampler tail of decoding", lambda name: name == "sampler tail: decode"),
    ("ties, NaN and ends in the argmax", lambda name: name == "sampler tail: chosen logits"),
    ("what generation calls", lambda name: name == "production entry points"),
    ("sequences that decode together", lambda name: name == "batched decode"),
    ("routing", lambda name: name.startswith("routing: ")),
)


def _right_modes(verdict: Verdict, modes: Sequence[str]) -> list[str]:
    """The traced runs whose ops are all right, where those of another run are not."""
    heads = {_local_head(mode, modes): f"the {mode} prefill" for mode in modes}
    heads["local, decoded positions"] = "the replay of the decoded tokens"
    heads["local, narrow flow"] = "the prefill of few columns"
    right = []
    for head, words in heads.items():
        ops = [c for c in verdict.checks if c.name.startswith(f"{head}: ") and _op(c.name)]
        if ops and all(check.state is State.OK for check in ops):
            right.append(f"every op of {words}")
    return right


def ruled_out(verdict: Verdict, modes: Sequence[str]) -> str:
    """What was checked and is right, in a sentence; empty where nothing is."""
    ops = [check for check in verdict.checks if _op(check.name)]
    right = [] if all(c.state is State.OK for c in ops) else _right_modes(verdict, modes)
    for words, holds in GROUPS:
        mine = [check for check in verdict.checks if holds(check.name)]
        if mine and all(check.state is State.OK for check in mine):
            right.append(words)
    return f"Checked and right: {', '.join(right)}." if right else ""
