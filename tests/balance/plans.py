"""What tests of planners share: prices, problems, and what every plan must keep to."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.problem import PlanProblem
from moeclipse.balance.shadow_model import ShadowCosts

COSTS = PlacementCosts.from_shapes(d_model=2048, d_ff=1408)
FREE = PlacementCosts(
    row_seconds=1.0,
    row_bytes=0,
    weight_bytes=0,
    gradient_bytes=0,
    state_bytes=0,
    near_bandwidth=1.0,
    far_bandwidth=1.0,
)
"""Only rows cost anything."""


def asked(
    counts_PE: np.ndarray,
    slots_P: tuple[int, ...],
    current: Placement,
    costs: PlacementCosts = FREE,
    noise: float = 0.0,
) -> PlanProblem:
    return PlanProblem(counts_PE=counts_PE, slots_P=slots_P, current=current, costs=costs, noise=noise)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...]]:
    """Counts [P, E] and slots that fit them; ranks without slots and idle experts included."""
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    slots = draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    while sum(min(count, num_experts) for count in slots) < num_experts:
        slots[slots.index(min(slots))] += 1
    numbers = st.integers(0, 10**6) | st.just(0)
    flat = draw(st.lists(numbers, min_size=num_ranks * num_experts, max_size=num_ranks * num_experts))
    flat[0] += not any(flat)
    return np.array(flat, dtype=np.int64).reshape(num_ranks, num_experts), tuple(slots)


def check_fits(placement: Placement, num_experts: int, slots_P: tuple[int, ...]) -> None:
    assert placement.num_experts == num_experts  # the record itself refuses lost experts and duplicates
    assert [len(row) for row in placement.slots] == list(slots_P)


def shadow_costs(**changes: float) -> ShadowCosts:
    """A wire of 1 Gbit/s, rows of 512 floats, experts of 2 x 512 x 1024, a slow processor."""
    given = {
        "num_parameters": 2 * 512 * 1024,
        "row_width": 512,
        "bandwidth": 125e6,
        "row_forward": 4e-5,
        "dtype": "fp32",
    }
    return ShadowCosts.from_shapes(**{**given, **changes})  # type: ignore[arg-type]
