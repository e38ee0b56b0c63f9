"""What `moeclipse place RUN` takes from a run: its loads, its shape, and what it measured.

A run's folder holds `config.toml` (the whole configuration), `load.npz` and, where anything was measured,
`choices.json`. Planning for a run with the prices of other hardware would contradict it. Nothing here needs
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeclipse.balance.objective import PlacementCosts, rows_per_pair
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import parse_json, read_text, table
from moeclipse.core.toml import parse_toml
from moeclipse.report.choices_form import fitting
from moeclipse.report.run import layers_with_experts
from moeclipse.report.skew import probe_of, sharers

DEFAULTS = {"d_model": 2048, "d_ff": 1408, "every": 50}
"""Of an expert and a run that nothing is known of."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run; of a bare file of loads, nothing."""

    load: Path
    config: dict[str, Any]
    choices: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunFacts:
        """`path`: the folder of a run, or its load.npz, or any other file of loads."""
        folder, load = (path, path / "load.npz") if path.is_dir() else (path.parent, path)
        if load.name != "load.npz":
            return cls(load=load, config={}, choices={})
        try:
            config = parse_toml(_text(folder / "config.toml"), "config.toml")
            choices = fitting(table(parse_json(_text(folder / "choices.json") or "{}", numbers=False)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: config.toml or choices.json cannot be read: {error}") from None
        return cls(load=load, config=config, choices=choices)

    def get(self, section: str, key: str) -> Any:
        return self.config.get(section, {}).get(key)

    @property
    def probe(self) -> dict[str, Any] | None:
        """What planners, or the first layer, were told or measured; None: nothing, or not all of it."""
        found = probe_of(self.choices)
        return None if found is None or None in found.values() else found

    @property
    def ranks(self) -> int | None:
        """That share the experts of a layer."""
        return sharers(self.choices, self.get("moe", "expert_tp"))

    def copies(self, ranks: int) -> int:
        """Groups of ranks that hold the same experts and share the rows of a step; 1 for other ranks."""
        return int(self.choices["ranks"][0]) if ranks == self.ranks else 1

    @property
    def hosts(self) -> tuple[int, ...]:
        """Of these ranks; empty: not known."""
        return tuple(self.choices.get("hosts") or ())

    @property
    def slots(self) -> int | None:
        """Of each rank: asked for, or chosen for the memory at hand; None: not known."""
        chosen = (self.choices.get("settled") or {}).get("placement.slots_per_rank")
        given = self.get("placement", "slots_per_rank")
        return next((slots for slots in (given, chosen) if isinstance(slots, int)), None)

    def size(self, name: str) -> int:
        """d_model, d_ff or every: the run's own, or the usual one."""
        keys = {"d_model": ("model", "d_model"), "d_ff": ("moe", "d_ff"), "every": ("placement", "lifetime")}
        found = self.get(*keys[name])
        return found if isinstance(found, int) and found > 0 else DEFAULTS[name]

    def costs(
        self,
        d_model: int | None,
        d_ff: int | None,
        device: str | None,
        link: str | None,
        *,
        every: int,
        ranks: int,
        nodes: int,
    ) -> tuple[PlacementCosts, str]:
        """What the run has measured, unless a shape or hardware is asked for; and what to say of it."""
        if self.probe is not None and (d_model, d_ff, device, link) == (None, None, None, None):
            top_k = self.get("gate", "top_k")
            saved = rows_per_pair(top_k if isinstance(top_k, int) else 1, ranks)
            costs = PlacementCosts.from_measured(self.probe, every, max(ranks // nodes, 1), saved)
            how = "planned by" if self.probe.get("fixed") else "measured on its ranks"
            return costs, f"seconds: from what the run has {how}"
        d_model, d_ff = d_model or self.size("d_model"), d_ff or self.size("d_ff")
        device, link = device or "h200", link or "infiniband"
        costs = PlacementCosts.from_shapes(
            d_model=d_model, d_ff=d_ff, device_name=device, far=link, card_per_rank=True, every=every
        )
        return costs, f"seconds: as if experts of {d_model} x {d_ff} ran on {device}, {link} between nodes"

    def layer_numbers(self, count: int) -> list[int]:
        """The numbers in the model of so many layers with experts."""
        first, dense = self.get("model", "num_dense_layers") or 0, self.get("model", "dense_layers") or ()
        return layers_with_experts(first, dense, count)


def _text(path: Path) -> str:
    return read_text(path) if path.is_file() else ""
