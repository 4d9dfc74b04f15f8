"""MathML of the formulas: a browser draws it itself, without a script and without a network."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)


def connect(app: Sphinx) -> None:
    """Have Sphinx write formulas as MathML; those that it cannot write are warned of."""
    app.add_html_math_renderer("mathml", (_within_text, None), (_by_itself, None))


def _within_text(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(_mathml(node, "inline"))
    raise nodes.SkipNode


def _by_itself(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(f'<div class="formula">{_mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def _mathml(node: nodes.math | nodes.math_block, display: str) -> str:
    """A formula as MathML, which holds a backslash where a command is not known."""
    formula = node.astext()
    try:
        found = convert(formula, display=display)
    except Exception as error:  # each fault of a formula has a class of its own
        logger.warning("formula %r: %s", formula, type(error).__name__, location=node)
        return ""
    if "\\" in found:
        logger.warning("formula %r has a command that is not known", formula, location=node)
    return found
