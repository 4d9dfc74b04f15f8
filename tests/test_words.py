"""Plain English: a module's first line has the field's own noun, and no message is mannered."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("rlhf_lab", "benchmarks", "tools")
# words for persons where code is meant, and the mannerisms of earlier docstrings
MANNERED = re.compile(
    r"\b(somebody|nobody|someone|whoever|mend(s|ed)?|so asked|who listens|what there is|"
    r"complaints?)\b",
    re.IGNORECASE,
)
# a first line that asks a question, or tells a story, hides the word that is searched for
PICTURE = re.compile(r"(What|Who|Whether|How|Where|Which|From|One way|Small) ")
# what a stranger searches for, and where the first line says it
NOUNS = {
    "KV cache": "rlhf_lab/models/kv_cache.py",
    "hold-out": "rlhf_lab/supervised.py",
    "Callbacks": "rlhf_lab/training/callbacks.py",
    "KL controllers": "rlhf_lab/training/kl_control.py",
    "Random streams": "rlhf_lab/training/random_streams.py",
    "Activation checkpointing": "rlhf_lab/models/forward.py",
    "Hook detection": "rlhf_lab/models/hooked_model.py",
    "GAE": "rlhf_lab/functional/advantages.py",
    "Policy losses": "rlhf_lab/functional/policy_loss.py",
    "KL divergence": "rlhf_lab/functional/kl.py",
    "Running mean": "rlhf_lab/functional/moments.py",
    "Sampling": "rlhf_lab/sampling.py",
    "logit lens": "rlhf_lab/probes/value_lens.py",
    "fine-tuning": "rlhf_lab/tuning/fit.py",
    "Validation": "rlhf_lab/config/checks.py",
}


def modules() -> list[Path]:
    """The files of the package and of its makers."""
    found = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    assert len(found) > 200
    return found


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Every string of a file with its line: docstrings, messages, and the parts of f-strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize("room", ROOMS)
def test_the_first_line_of_every_module_is_one_sentence_without_a_picture(room):
    for path in modules():
        if path.relative_to(ROOT).parts[0] != room:
            continue
        first, *_ = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")
        assert re.match(r"[A-Z`].*[.]$", first), f"{path}: {first!r}"
        assert not PICTURE.match(first) and not MANNERED.search(first), f"{path}: {first!r}"


def test_no_docstring_and_no_message_of_the_package_is_mannered():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {MANNERED.search(text)[0]}"
        for path in modules()
        if path.is_relative_to(ROOT / "rlhf_lab")
        for line, text in strings(path.read_text("utf-8"))
        if MANNERED.search(text)
    ]
    assert not found, found


def test_a_word_in_an_f_string_and_in_a_docstring_is_found():
    source = 'def f(x):\n    """For whoever asks."""\n    raise E(f"{x} is bad; mend it.")\n'
    assert [line for line, text in strings(source) if MANNERED.search(text)] == [2, 3]


@pytest.mark.parametrize("noun", NOUNS)
def test_the_nouns_of_the_field_are_found_in_first_lines(noun):
    first = (ROOT / NOUNS[noun]).read_text("utf-8").split("\n", 1)[0]
    assert noun in first, first
