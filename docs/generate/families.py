"""Generation of the table of model families in docs/models.md."""

from __future__ import annotations

from pathlib import Path

from async_rl.planning.shape import FAMILIES
from docs.generate.settings import table

_PAGE = Path(__file__).resolve().parents[1] / "models.md"
_START, _END = "<!-- families: written by make docs -->\n", "<!-- end of families -->\n"


def models_page() -> str:
    """Return docs/models.md with the tables between its marks."""
    trained, renamed, refused = (FAMILIES[name] for name in ("trains", "renamed", "refused"))
    rows = [(f"`{kind}`" + " \\*" * (kind in renamed), models) for kind, models in trained.items()]
    kinds: dict[str, list[str]] = {}
    for kind, why in refused.items():
        kinds.setdefault(why, []).append(f"`{kind}`")
    reasons = [(why, ", ".join(names)) for why, names in kinds.items()]
    parts = [table(("`model_type`", "models"), rows), "", "## Refused", ""]
    parts.append(table(("reason", "`model_type`"), reasons))
    before, _, rest = _PAGE.read_text().partition(_START)
    return before + _START + "\n".join([*parts, _END]) + rest.partition(_END)[2]
