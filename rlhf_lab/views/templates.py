"""Files of the folder web: styles, scripts, and templates that escape what they are given."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def formatted(value: Any, low: float | None = None, high: float | None = None) -> Any:
    """Return a value as it is shown: a dash for None, a float as in 0.42 or 0.42 [0.31, 0.53]."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    ends = "" if low is None or high is None else f" [{low:z.3g}, {high:z.3g}]"
    return f"{value:z.4g}{ends}" if isinstance(value, float) else value


WEB = Path(__file__).parent / "web"
TEMPLATES = Environment(
    loader=FileSystemLoader(WEB),
    autoescape=True,
    finalize=formatted,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def read_web(*names: str) -> str:
    return "\n".join((WEB / name).read_text(encoding="utf-8") for name in names)


def render(template: str, **values: Any) -> str:
    return TEMPLATES.get_template(template).render(values)
