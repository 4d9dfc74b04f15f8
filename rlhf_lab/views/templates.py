"""Files of the folder web: styles, scripts, and templates that escape what they are given."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

WEB = Path(__file__).parent / "web"
TEMPLATES = Environment(
    loader=FileSystemLoader(WEB),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def read_web(*names: str) -> str:
    return "\n".join((WEB / name).read_text(encoding="utf-8") for name in names)


def render(template: str, **values: Any) -> str:
    return TEMPLATES.get_template(template).render(values)
