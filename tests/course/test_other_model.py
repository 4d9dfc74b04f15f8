"""Every lesson runs on a GPT-2 when the line `SETTINGS` says so, and nothing else is changed."""

import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf_lab.config import PRESETS, RLHFArgs
from tests.tiny_models import randomize, save, tiny_gpt2
from tests.warm import WarmPython
from tools.course import builder

ROOT = Path(__file__).parents[2]
ON_REEL = (
    *(path.stem for path in builder.masters(ROOT) if path.parent.name == "more"),
    "04_the_policy",
    "05_rewards_and_credit",
    "06_the_kl_penalty",
    "07_what_breaks_it",
    "10_preferences",
    "13_your_question",
)
"""Lessons that compare with exact values throughout, which no other language has."""
LESSONS = [path for path in builder.masters(ROOT) if path.stem not in ON_REEL]
DAILY = ("00_start",)
RUN = [path for path in LESSONS if os.environ.get("RLHF_LAB_NIGHTLY") or path.stem in DAILY]
SMALL = {"total_phases": 6, "batch_size": 16, "num_minibatches": 2, "gen_len": 12}
WORDS = (
    "This is this quite I The movie film plot story acting script was good great wonderful "
    "fantastic excellent brilliant lovely perfect bad terrible awful horrible boring poor weak "
    "stupid loved hated"
)

RUN_NOTEBOOK = """
import sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

import rlhf_lab

rlhf_lab.check_shapes = lambda: None  # this process began with the package imported
shell = InteractiveShell.instance()
shell.ast_node_interactivity = "none"
shell.safe_execfile_ipy(Path(sys.argv[1]), raise_exceptions=True)
"""
"""All cells as a kernel would run them, without showing the last expression of each."""


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: bytes and merges, one special token, and one token for each of WORDS."""
    core = ByteLevelBPETokenizer()
    core.train_from_iterator(
        [f" {WORDS}"], vocab_size=1000, min_frequency=1, special_tokens=["<|endoftext|>"]
    )
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer, **dict.fromkeys(roles, "<|endoftext|>")
    )


def on_gpt2(master: Path) -> nbformat.NotebookNode:
    """The solution with another preset, with phases small enough for a test, and a learning rate
    that moves a random model within them.
    """
    notebook = builder.solution_notebook(master)
    (settings,) = (cell for cell in notebook.cells if "SETTINGS = dict(" in cell.source)
    for name, value in {"preset": '"gpt2-medium", base_lr=0.01', **SMALL}.items():
        line, changed = rf"^    {name}=.*,$", f"    {name}={value},"
        settings.source, n = re.subn(line, changed, settings.source, flags=re.MULTILINE)
        assert n == 1
    return notebook


@pytest.fixture(scope="module")
def printed(
    tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython, surroundings: dict[str, str]
) -> dict[str, subprocess.CompletedProcess[str]]:
    """What each lesson printed, in a folder where the preset's two models are tiny and random."""
    place, tokenizer = tmp_path_factory.mktemp("gpt2"), byte_level_tokenizer()
    shape = {"vocab_size": len(tokenizer), "n_positions": 64, "n_ctx": 64, "n_layer": 1}
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=16, n_layers=1, n_heads=2, hidden_dim=16
    )
    classifier: PreTrainedModel = DistilBertForSequenceClassification(config)
    randomize(classifier, 4)
    args = RLHFArgs(preset="gpt2-medium")
    save(tiny_gpt2(**shape), tokenizer, place / args.base_model)
    save(classifier, tokenizer, place / args.reward_model)
    notebooks = [place / f"{master.stem}.ipynb" for master in RUN]
    for master, notebook in zip(RUN, notebooks, strict=True):
        nbformat.write(on_gpt2(master), notebook)
    own = {"RLHF_LAB_PROGRESS": str(place / "progress.json"), "IPYTHONDIR": str(place / "ipython")}
    return {
        notebook.stem: warm_python.run(
            ["-c", RUN_NOTEBOOK, notebook.name], cwd=place, env=surroundings | own
        )
        for notebook in notebooks
    }


@pytest.mark.slow
@pytest.mark.parametrize("master", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_on_gpt2_with_one_changed_line(
    master: Path, printed: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    if master not in RUN:
        pytest.skip("RLHF_LAB_NIGHTLY is unset")
    done = printed[master.stem]
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-3000:]
    assert not re.findall(r".*(?<!torch\.)\b(?:nan|inf)\b.*", text)
    assert "✓" in text and "✗" not in text


def test_the_settings_of_the_lessons_are_those_of_reel() -> None:
    """What a lesson pins for other models is what the text, which is about Reel, speaks of."""
    pinned = dict(gen_len=26, top_k=None, advantages="gae", kl_coef=0.3)
    assert {name: PRESETS["reel"][name] for name in pinned} == pinned
    for master in LESSONS:
        text = master.read_text(encoding="utf-8")
        for name, value in pinned.items():
            assert f"\n    {name}={value!r},\n".replace("'", '"') in text, (master.stem, name)
