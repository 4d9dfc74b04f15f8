"""What every model card says: the hub's front matter, the base model, how to load, the license."""

import json
from pathlib import Path
from typing import Any

from rlhf_lab.errors import LoadError
from rlhf_lab.models.load import locate
from rlhf_lab.organism.bundled import BUNDLED

CARD = "README.md"
LOAD_EXPORT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
"""


def front_matter(base_model: str | None, library: str, method: str) -> str:
    """What the model hub reads: YAML between two rules.

    Args:
        base_model: what the weights were made from; None if it was handed in without a name.
        library: what the directory is loaded with.
        method: one more tag.
    """
    fields: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if _is_hub_id(base_model):
        fields["base_model"] = locate(base_model)[0]
    fields["license"] = "mit" if base_model in BUNDLED else "unknown"
    fields["tags"] = ["rlhf", "reinforcement-learning", "rlhf_lab", method]
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def base_in_words(base_model: str | None) -> str:
    """The base model in words; of a directory, its name and not its place."""
    if base_model is None:
        return "a model that was handed in"
    if base_model in BUNDLED:
        return f"`{base_model}`, which comes with rlhf_lab"
    if _is_hub_id(base_model):
        return f"`{base_model}`"
    return f"the model in a local directory `{Path(base_model).name}`"


def license_in_words(base_model: str | None) -> str:
    """What is known of it: nothing, but of the models that come with the package."""
    if base_model in BUNDLED:
        return f"`{base_model}` comes with rlhf_lab, under the MIT license."
    return (
        "These weights were made from the base model's, whose license holds for them; the run does "
        "not know it. Look at the base model's page before passing them on."
    )


def is_path(name: str) -> bool:
    """Whether a name is that of a directory, here or where the run was."""
    try:
        return locate(name)[1]
    except LoadError:
        return True


def program(code: str) -> str:
    """A program in Python, as Markdown."""
    return f"```python\n{code}```"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table, as Markdown."""
    cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)]
    lines = [cells[0], ("---",) * len(head), *cells[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_hub_id(base_model: str | None) -> bool:
    return base_model is not None and base_model not in BUNDLED and not is_path(base_model)
