"""Files of the folder web: styles, scripts, and templates that escape what they are given."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def formatted(value: Any) -> Any:
    """Return a value as a page has it: a dash for None, a number with four digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:z.4g}" if isinstance(value, float) else value


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
