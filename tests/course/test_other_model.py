"""Every lesson runs on a GPT-2 when the line `SETTINGS` says so, and nothing else is changed."""

import re
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_lab.config import RLHFArgs
from tests.course.test_lesson_again import MASTERS, Cells
from tests.tiny_models import randomize, save, tiny_gpt2
from tools.course import builder

# lessons that compare with exact values throughout, which no other language has
ON_REEL = ("04_the_policy", "05_rewards_and_credit", "06_the_kl_penalty", "07_what_breaks_it")
ON_REEL += ("10_preferences", "12_verifiable_rewards", "13_your_question")
LESSONS = [x for x in MASTERS if x.parent.name != "more" and x.stem not in ON_REEL]
SMALL = {"total_phases": 6, "batch_size": 16, "num_minibatches": 2, "gen_len": 12}
WORDS = (
    "This is this quite I The movie film plot story acting script was good great wonderful "
    "fantastic excellent brilliant lovely perfect bad terrible awful horrible boring poor weak "
    "stupid loved hated"
)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: bytes and merges, one special token, and one token for each of WORDS."""
    core, end = ByteLevelBPETokenizer(), "<|endoftext|>"
    core.train_from_iterator([f" {WORDS}"], 1000, min_frequency=1, special_tokens=[end])
    roles = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), end)
    return PreTrainedTokenizerFast(tokenizer_object=core._tokenizer, **roles)


def on_gpt2(master: Path) -> Cells:
    """The solution with another preset, small phases, and a learning rate for a random model."""
    notebook = builder.solution_notebook(master)
    (settings,) = (cell for cell in notebook.cells if "SETTINGS = dict(" in cell.source)
    settings.source = re.sub(r"^    base_lr=.*\n", "", settings.source, flags=re.MULTILINE)
    for name, value in {"preset": '"gpt2-medium", base_lr=0.01', **SMALL}.items():
        line, changed = rf"^    {name}=.*,$", f"    {name}={value},"
        settings.source, n = re.subn(line, changed, settings.source, flags=re.MULTILINE)
        assert n == 1
    return [(i, x.source) for i, x in enumerate(notebook.cells) if x.cell_type == "code"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the preset's two models are tiny and random."""
    place, tokenizer = tmp_path_factory.mktemp("gpt2"), byte_level_tokenizer()
    shape = {"vocab_size": len(tokenizer), "n_positions": 64, "n_ctx": 64, "n_layer": 2}
    sizes = {"vocab_size": len(tokenizer), "dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2}
    classifier = DistilBertForSequenceClassification(DistilBertConfig(**sizes))
    randomize(classifier, 4)
    args = RLHFArgs(preset="gpt2-medium")
    save(tiny_gpt2(**shape), tokenizer, place / args.base_model)
    save(classifier, tokenizer, place / args.reward_model)
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    "master",
    [
        pytest.param(x, id=x.stem, marks=[] if x.stem == "00_start" else pytest.mark.nightly)
        for x in LESSONS
    ],
)
def test_a_lesson_runs_on_gpt2_with_one_changed_line(master: Path, place: Path, run_cells) -> None:
    text = run_cells(on_gpt2(master), place)
    assert not re.findall(r".*(?<!torch\.)\b(?:nan|inf)\b.*", text)
    assert "✓" in text and "✗" not in text
