"""Plain English: a module's first line describes its contents, and no message is mannered."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
# words for persons where code is meant, and the mannerisms of earlier docstrings
MANNERED = re.compile(
    r"\b(somebody|nobody|someone|whoever|mend(s|ed)?|so asked|who listens|what there is|"
    r"complaints?)\b",
    re.IGNORECASE,
)
# a first line that asks a question, or tells a story, hides the word that is searched for
PICTURE = re.compile(r"(What|Who|Whether|How|Where|Which|From|One way|Small) ")


def test_module_lines_and_messages_are_plain():
    paths = [p for room in ("rlhf_lab", "benchmarks", "tools") for p in (ROOT / room).rglob("*.py")]
    assert len(paths) > 200
    for path in paths:
        tree = ast.parse(path.read_text("utf-8"))
        first = (ast.get_docstring(tree) or "").split("\n")[0]
        assert re.match(r"[A-Z`].*[.]$", first), f"{path}: {first!r}"
        assert not PICTURE.match(first) and not MANNERED.search(first), f"{path}: {first!r}"
        for node in ast.walk(tree) if path.is_relative_to(ROOT / "rlhf_lab") else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not MANNERED.search(node.value), f"{path}:{node.lineno}"
