"""Sphinx configuration of the site: extensions, theme, and references without a target."""

import rlhf_lab
from tools.site import extension

project = "rlhf_lab"
copyright = "The rlhf_lab authors, MIT licence"
version = release = rlhf_lab.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]
nitpicky = True
nitpick_ignore_regex = [  # other packages, and types that no room exports
    (r"py:(class|exc|data)", r"(?!rlhf_lab\b).*"),
    (r"py:obj", r"(None|True|False|collections|jaxtyping|numpy|torch|typing)\b.*"),
    (r"py:class", r"rlhf_lab\.(?!errors\b).*"),
]
html_theme = "furo"
html_math_renderer = "mathml"
html_title = f"rlhf_lab {rlhf_lab.__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
smartquotes = False
pygments_style = "tango"
pygments_dark_style = "monokai"
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides: list[tuple[str, str, int]] = []
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_use_type_comments = False
python_maximum_signature_line_length = 72
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def setup(app) -> None:
    """Register the events of the site."""
    extension.connect(app)
