"""Labels of a trace as people read them: no page shows the codes that programs are written in.

    in_words("R_F@3")                                    # results of experts, forward, step 3
    in_words("dispatch S_F@0, layer 2, microbatch 1")    # dispatch, forward, step 0, layer 2, microbatch 1
    kind_of("dispatch S_F@0, layer 2, microbatch 1")     # dispatch, forward

What is no op (a kernel's name, say) stays as it is.
"""

from __future__ import annotations

import re

PARTS = {
    "S": "rows to experts",
    "C": "experts",
    "R": "results of experts",
    "MLP": "experts",
    "ATTN": "attention",
    "ROUTE": "gate",
    "SHARED": "shared expert",
    "DISPATCH": "dispatch",
    "COMBINE": "combine",
    "HEAD": "head",
    "SHADOW": "copied expert",
    "INPUT": "input of a layer",
    "SEND": "send to another stage",
    "RECV": "receive from another stage",
    "COUNTS": "rows of each rank",
    "LOADS": "loads of experts",
    "SIZES": "sizes of an exchange",
    "SCORES": "scores",
    "TENSOR": "tensor parallelism",
    "TIED": "tied embedding",
    "BUCKET": "bucket",
    "GRAD": "gradient of a bucket",
    "WEIGHTS": "weights of experts",
    "RESULTS": "loss and norm",
}
WHOLE = {
    "BUCKET_GATHER": "gather of parameters",
    "BUCKET_REDUCE": "reduction of gradients",
    "BUCKET_UPDATE": "update of parameters",
}
"""Ops whose two words together say something else."""
FORMS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "R": "recompute",
    "SEND": "sent",
    "REDUCE": "reduce",
    "ADD": "added",
    "SUM": "sum",
    "GATHER": "gather",
    "UPDATE": "update",
    "UNSHARD": "unshard",
    "RESHARD": "reshard",
    "FETCH": "fetched from the host",
    "STORE": "stored on the host",
}
CODE = re.compile(
    r"(?:(?P<stage>\d+)(?:\.(?P<layer>\d+))?)?(?P<part>[A-Z]{1,8})(?:_(?P<form>[A-Z]+))?(?P<microbatch>\d+)?"
    r"(?:@(?P<step>\d+))?(?:#(?P<chunk>\d+)/(?P<chunks>\d+))?(?:~(?P<expert>\d+))?"
)
"""An op as `schedule/text` writes it."""


EMBEDDED = re.compile(r"^(?:backward )?(?P<verb>\w+) (?P<code>[SRC]_[A-Z]+@\S*?)(?=,|$)")
"""A transfer of rows as the layer names it: its verb, then its op."""
BETWEEN = re.compile(
    r"(?P<what>activations|gradients) \d+(?P<way>SEND|RECV)_[A-Z]+\d+ \((?P<where>[^()]*)\)"
    r" on lane p2p:(?P<source>\d+)>(?P<to>\d+)"
)
PASS = re.compile(r"(?P<layer>layer \d+) (?P<form>[FB])")
BUCKET = re.compile(r"\bbucket (\w+)\.(\d+)")
LANES = {
    "a2a": "all-to-all",
    "dp": "data parallel",
    "tp": "tensor parallel",
    "host:fetch": "from the host",
    "host:store": "to the host",
}
WHICH = re.compile(
    r",? (?:of )?(?:layer|microbatch|step|stage|expert|bucket|chunk) \d+(?: of \d+)?"
    r"| (?:to|from) rank \d+|\s\d+\b"
)
"""What tells ops of one kind apart."""


def in_words(label: str) -> str:
    if found := EMBEDDED.search(label):
        told = op_in_words(found["code"]) or found["code"]
        return f"{found['verb']}, {told.partition(', ')[2]}{label[found.end() :]}"
    if found := BETWEEN.fullmatch(label):
        way = (
            f"sent to rank {found['to']}"
            if found["way"] == "SEND"
            else f"received from rank {found['source']}"
        )
        return f"{found['what']} {way}, {found['where']}"
    if found := PASS.fullmatch(label):
        return f"{found['layer']}, {FORMS[found['form']]}"
    code, _, rest = label.partition(" ")
    told = op_in_words(code)
    return BUCKET.sub(r"bucket \2 (\1)", label) if told is None else told + (f" {rest}" if rest else "")


def op_in_words(code: str) -> str | None:
    """None where it is no op of a program."""
    found = CODE.fullmatch(code)
    if found is None:
        return None
    part, form = found["part"], found["form"]
    whole = WHOLE.get(f"{part}_{form}")
    if part in FORMS and form is None and part not in PARTS:  # a whole stage is named by its form alone
        words = [f"stage {found['stage']}" if found["stage"] else "stage", FORMS[part]]
    elif part in PARTS and (form is None or form in FORMS):
        words = [whole] if whole else [PARTS[part], *([FORMS[form]] if form else [])]
        words += [f"stage {found['stage']}"] if found["stage"] and found["layer"] is None else []
        words += [f"layer {found['layer']}"] if found["layer"] else []
    else:
        return None
    at = "bucket" if part == "BUCKET" else "step"
    words += [
        f"{name} {found[key]}"
        for name, key in (("microbatch", "microbatch"), (at, "step"), ("expert", "expert"))
        if found[key]
    ]
    words += [f"chunk {int(found['chunk']) + 1} of {found['chunks']}"] if found["chunk"] else []
    return ", ".join(words)


def kind_of(label: str) -> str:
    """Labels that differ by numbers alone are one kind: `dispatch of layer 3` is a `dispatch`."""
    return WHICH.sub("", in_words(label)).strip()[:80]


def lane_in_words(lane: str) -> str:
    name, _, ranks = lane.partition(":")
    if name == "p2p" and ">" in ranks:
        return f"rank {ranks.replace('>', ' to rank ')}"
    return LANES.get(lane, lane)
