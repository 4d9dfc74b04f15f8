"""Groups of weights: a partition of every architecture, and what a faulty one is refused for."""

import pytest

from rlhf_lab.diffing import Groups, WeightLine, coarse_groups, fine_groups
from rlhf_lab.diffing.groups import check_partition, weights_of_both
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, effective_weights, load_model
from tests.tiny_families import TINY, tiny_of
from tests.tiny_models import tiny_llama


def test_a_model_of_two_blocks_has_seven_coarse_groups_and_eighteen_fine_ones(base):
    coarse = ["embed", "L0 attn", "L0 mlp", "L1 attn", "L1 mlp", "ln_final", "unembed"]
    assert coarse_groups(base).names == coarse
    block = ["ln1", "H0", "H1", "H2", "H3", " b_O", " mlp"]
    spaced = [part if part[0] in " H" else f" {part}" for part in block]
    blocks = [f"L{layer}{part}" for layer in range(2) for part in spaced]
    assert fine_groups(base).names == ["embed", "pos_embed", *blocks, "ln_final", "unembed"]
    head = {name.rsplit(".", 1)[-1] for name, index in fine_groups(base).of("L1H2") if index == 2}
    assert head == {"W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"}


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("make", [fine_groups, coarse_groups])
def test_groups_are_a_partition_of_every_architecture(make, architecture, llama_tokenizer):
    model = load_model(tiny_of(architecture), llama_tokenizer)
    check_partition(make(model), effective_weights(model))


def test_shared_keys_and_values_are_groups_of_their_own(llama_tokenizer):
    model = load_model(tiny_llama(), llama_tokenizer)
    groups = fine_groups(model)
    assert [name for name in groups.names if name.startswith("L1KV")] == ["L1KV0", "L1KV1"]
    assert {("blocks.1.attn._W_K", 1), ("blocks.1.attn._W_V", 1)} < set(groups.of("L1KV1"))
    assert all(name.rsplit(".", 1)[-1] in ("W_Q", "b_Q", "W_O") for name, _ in groups.of("L1H3"))


@pytest.mark.parametrize(
    ("added", "error"),
    [
        (("embed.W_X", None), "of embed.W_X, which the model does not have"),
        (("blocks.0.attn.W_Q", 4), "head 4 of blocks.0.attn.W_Q"),
        (("blocks.0.attn.W_Q", 1), "repeat blocks.0.attn.W_Q"),
        (("unembed.W_U", None), "repeat unembed.W_U"),
        (None, "leave out unembed.b_U|leave out unembed.W_U"),
    ],
)
def test_partition_raises_on_the_wrong_parameter(base, added, error):
    groups = coarse_groups(base)
    parts = [*groups.parts[:-1], [*groups.parts[-1], added] if added else groups.parts[-1][:-1]]
    with pytest.raises(ConfigError, match=error):
        check_partition(Groups(groups.names, parts), effective_weights(base))
    with pytest.raises(ConfigError, match="a different name for each"):
        check_partition(Groups(["embed"] * len(groups), groups.parts), effective_weights(base))
    with pytest.raises(ConfigError, match="Choose one of: embed"):
        groups.of("L9 mlp")


@pytest.mark.usefixtures("no_type_checks")
def test_models_with_other_weights_are_not_compared(base, llama_tokenizer):
    with pytest.raises(ConfigError, match="do not have the same weights"):
        weights_of_both(base, load_model(tiny_llama(), llama_tokenizer))
    with pytest.raises(ConfigError, match="Pass its base_model"):
        WeightLine(base, TransformerWithValueHead(base))
