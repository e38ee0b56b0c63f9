"""What version 0.1 promised, as it was stored when that version was current. Nothing here is made anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data" / "release-0.1"
PUBLIC: dict[str, Any] = json.loads((FOLDER / "public.json").read_text())
