"""The models that are timed, the arithmetic of a phase, and what is refused."""

import pytest
import torch

from benchmarks import flops
from benchmarks.flops import phase_flops, trunk_flops
from benchmarks.work import SHAPES, Shape, Work, random_model, word_tokenizer, write_model
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.sampling import tokenize_prompts


@pytest.mark.parametrize("name", ["nano", "tiny"])
def test_a_shape_builds_and_has_as_many_parameters_as_it_says(name, tmp_path):
    shape = SHAPES[name]
    write_model(shape, tmp_path)
    model = load_model(str(tmp_path))
    cfg = model.cfg
    built = (cfg.n_layers, cfg.d_model, cfg.n_heads, cfg.d_vocab, cfg.n_ctx)
    assert built == (shape.n_layers, shape.d_model, shape.n_heads, shape.d_vocab, shape.n_ctx)
    assert sum(p.numel() for p in random_model(shape).parameters()) == shape.n_parameters


def test_gpt2_shapes_have_the_published_number_of_parameters():
    assert SHAPES["small"].n_parameters == 124_439_808
    assert SHAPES["medium"].n_parameters == 354_823_168


def test_weights_come_from_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    a, b, c = (random_model(SHAPES["nano"], seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


def test_the_prefix_has_as_many_tokens_as_the_work_says():
    tokenizer = word_tokenizer(74)
    work = Work(shape="nano", prefix_len=4)
    assert tokenize_prompts(tokenizer, [work.prefix], True) == [[0, 2, 3, 4]]


def test_flops_of_one_layer_by_hand():
    # d 2, one layer, n 3: products with weights 24 * 4 * 3 = 288; attention: token t looks at t
    # tokens, scores 2 * 2 t and mix 2 * 2 t: 8 * (1 + 2 + 3) = 48.
    shape = Shape(n_layers=1, d_model=2, n_heads=1, d_vocab=5, n_ctx=8)
    assert trunk_flops(shape, 3) == 288 + 48


def test_flops_of_a_phase_by_hand(monkeypatch):
    shape = Shape(n_layers=1, d_model=2, n_heads=1, d_vocab=5, n_ctx=8)
    monkeypatch.setattr(Work, "size", shape)
    work = Work(
        shape="nano", batch_size=4, prefix_len=2, gen_len=2, num_minibatches=2, passes=2, top_k=1
    )
    # Trunk over the prompt (2 tokens): 24 * 4 * 2 + 8 * 3 = 216; over the 3 tokens that are run:
    # 336. Logits 2 * 2 * 5 = 20, value head 2 * 2 * 8 + 2 * 8 * 1 = 48: 68 per state.
    # Sampling: the prompt once, 4 rows of one more token, and 1 + 4 states.
    # Reference: 4 rows of 336 and 2 states of 20. Learning: 2 passes, 3 times 4 rows of 336 and
    # 2 states of 68.
    assert phase_flops(work) == {
        "sampling": 216 + 4 * (336 - 216) + 5 * 68,
        "reference": 4 * (336 + 2 * 20),
        "learning": 2 * 3 * 4 * (336 + 2 * 68),
    }


def test_a_gpt2_small_phase_needs_about_three_teraflop():
    # 124e6 weights that multiply, 2 operations each: about 0.25e9 per token. Sampling and reference
    # run 32 * 53 tokens, learning 6 times as many forwards: 8 * 32 * 53 * 0.25e9 = 3.4e12.
    assert sum(phase_flops(Work(shape="small")).values()) == pytest.approx(3.4e12, rel=0.05)


def test_the_floor_is_each_parts_operations_over_its_own_rate(monkeypatch):
    seen = []

    def rate(work, rows):
        seen.append((rows, torch.get_num_threads()))
        return {8: 1e6, 2 * 9: 1e9}[rows]

    monkeypatch.setattr(flops, "product_rate", rate)
    work = Work(shape="nano", batch_size=8, gen_len=6, threads=2)
    counted, seconds = phase_flops(work), flops.floor_seconds(work)
    assert seconds["sampling"] == counted["sampling"] / 1e6
    assert seconds["reference"] == counted["reference"] / 1e9
    assert seconds["learning"] == counted["learning"] / 1e9
    assert [threads for _, threads in seen] == [2, 2]
    assert torch.get_num_threads() == 1


def test_the_rate_is_the_operations_of_all_products_over_their_time(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(flops, "perf_counter", lambda: float(next(ticks)))
    shape = Shape(n_layers=2, d_model=2, n_heads=1, d_vocab=5, n_ctx=8)
    monkeypatch.setattr(Work, "size", shape)
    # Each measurement lasts one tick. Per row 2 blocks of 24 * 4 and 2 * 2 * 5 of the unembedding.
    assert flops.product_rate(Work(shape="nano", gen_len=2), 3) == 3 * (2 * 96 + 20)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"batch_size": 0}, ("batch_size=0", "1 or greater")),
        ({"batch_size": 30}, ("batch_size=30", "multiple")),
        ({"gen_len": 0}, ("gen_len=0",)),
        ({"gen_len": 200}, ("gen_len=200", "124")),
        ({"threads": 0}, ("threads=0",)),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, words):
    with pytest.raises(ConfigError) as refusal:
        Work(shape="nano", **sizes)
    assert all(word in str(refusal.value) for word in words)
