"""Pages that a command writes: one file each, with its style, without scripts or other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.core.errors import ConfigError
from async_rl.core.extras import require


def refuse_existing(html: Path | None) -> None:
    """Raise ConfigError if the file exists."""
    if html is not None and html.exists():
        raise ConfigError(f"--html {html}: the file exists; choose another name or delete it")


def rendered(template: str, **values: Any) -> str:
    """Return the page of a template. Raises ConfigError without the extra of the web view."""
    require("jinja2", "--html")
    from async_rl.runs.view.server import environment, static_text

    style = static_text("style.css")
    return str(environment().get_template(template).render(style=style, **values))
