"""The sender x receiver matrix: plants, margins by other ways, and faults that its checks tell."""

import copy

import pytest
import torch

from rlhf_lab.diffing import coarse_groups, fine_groups
from rlhf_lab.diffing.shift_matrix import shift_by_weights, shift_matrix
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import add_lora, load_model
from tests.diffing.faults_shift_matrix import SHIFT_MATRIX_FAULTS
from tests.diffing.shift_matrix_checks import check_shift_matrix
from tests.probes.planting import planted
from tests.tiny_families import random_tokens, tiny_of

WORDS = (5, 9)
POS = -3


@pytest.fixture(scope="module")
def far(base, make_tuned):
    """A model far enough away that the line between the two is curved."""
    return make_tuned(base, size=0.3)


@pytest.fixture(scope="module")
def found(base, far, reviews):
    return shift_matrix(base, far, reviews[:4], POS, WORDS, fine_groups(base))


@pytest.mark.slow
def test_it_sums_to_the_shift_and_holds_to_the_models(base, far, reviews, found):
    checks = check_shift_matrix(
        found, base, far, reviews[:4], POS, WORDS, fine_groups(base), seed=3
    )
    assert all(check.ok for check in checks), checks
    assert found.measured.abs().max() > 0.1
    few = shift_matrix(base, far, reviews[:4], POS, WORDS, coarse_groups(base), nodes=1)
    assert few.error > 20 * found.error  # the line is curved


def test_its_row_sums_come_from_backward_passes_too(base, far, reviews, found):
    rows = shift_by_weights(base, far, reviews[:4], POS, WORDS, fine_groups(base))
    torch.testing.assert_close(rows, found.by_weights.mean(1), atol=1e-5, rtol=0)
    coarse = shift_by_weights(base, far, reviews[:4], POS, WORDS, coarse_groups(base))
    parts = fine_groups(base).names
    first = [i for i, name in enumerate(parts) if name.startswith("L0") and "mlp" not in name]
    assert coarse[1].item() == pytest.approx(rows[first].sum().item(), abs=1e-5)


def test_a_read_out_alone_shows_in_one_column_of_one_row(base, reviews):
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.unembed.W_U[:, WORDS[0]] *= 1.2
    found = shift_matrix(base, tuned, reviews[:4], POS, WORDS, fine_groups(base))
    row, column = found.groups.index("unembed"), found.columns.index("read_out")
    torch.testing.assert_close(found.values[row, column], found.measured, atol=1e-5, rtol=0)
    found.values[row, column] = 0
    assert not found.values.any()


def test_one_head_alone_sends_to_itself_and_to_what_reads_it(base, make_tuned, reviews):
    noisy, tuned = make_tuned(base, size=0.5), copy.deepcopy(base)
    with torch.no_grad():
        tuned.blocks[0].attn.W_V[1] = noisy.blocks[0].attn.W_V[1]
    found = shift_matrix(base, tuned, reviews[:4], POS, WORDS, fine_groups(base))
    assert {name for name, row in zip(found.groups, found.values, strict=True) if row.any()} == {
        "L0H1"
    }
    through = {n for n, c in zip(found.columns, found.by_output, strict=True) if c.any()}
    later = {"L0 mlp", "L1H0", "L1H1", "L1H2", "L1H3", "L1 mlp", "scale"}
    assert through == {"L0H1"} | later


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_models_of_other_kinds_and_adapters(architecture, llama_tokenizer):
    base = load_model(tiny_of(architecture), llama_tokenizer)
    tuned, tokens = copy.deepcopy(base), random_tokens(2, 12)
    add_lora(tuned, rank=2, alpha=4.0, targets=("W_V", "W_out"))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if name.endswith(".B"):
                weight += 0.1
    groups = coarse_groups(base)
    found = shift_matrix(base, tuned, tokens, POS, WORDS, groups)
    checks = check_shift_matrix(found, base, tuned, tokens, POS, WORDS, groups, anew=2)
    assert all(check.ok for check in checks), checks
    assert not found.values[found.groups.index("unembed")].any()


def test_logits_that_are_no_sum_and_bad_numbers_are_refused(base, tuned, reviews, llama_tokenizer):
    capped = load_model(tiny_of("Olmo2ForCausalLM"), llama_tokenizer)
    with pytest.raises(ConfigError, match="not a sum over its heads"):
        shift_matrix(capped, capped, random_tokens(), POS, WORDS, coarse_groups(capped))
    with pytest.raises(ConfigError, match="nodes=0"):
        shift_matrix(base, tuned, reviews, POS, WORDS, coarse_groups(base), nodes=0)
    with pytest.raises(ConfigError, match="pos=99"):
        shift_by_weights(base, tuned, reviews, 99, WORDS, coarse_groups(base))


@pytest.mark.slow
@pytest.mark.parametrize("fault", SHIFT_MATRIX_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told(base, far, reviews, no_type_checks, fault):
    groups, text = coarse_groups(base), reviews[:2]
    with planted(fault):
        found = shift_matrix(base, far, text, POS, WORDS, groups)
        checks = check_shift_matrix(found, base, far, text, POS, WORDS, groups, seed=1, anew=3)
    assert not all(check.ok for check in checks)
