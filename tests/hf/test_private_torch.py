"""The private names of transformers that we use are there, and mean what we think."""

from __future__ import annotations

from test_foreign_experts import experts_of

from moeclipse.hf.private_torch import gate_of, goes_beyond, implementation_of, is_default


def test_names_are_there() -> None:
    plain, own = experts_of("mixtral"), experts_of("gpt_oss")
    assert is_default(gate_of(plain))
    assert not is_default(gate_of(own))
    assert implementation_of(plain) == "eager"
    plain.config._experts_implementation = "batched_mm"
    assert implementation_of(plain) == "batched_mm"
    assert not goes_beyond(plain)
    plain._is_expert_parallel = True
    assert goes_beyond(plain)
