"""The researcher's programs on a real model: SmolLM2 with LoRA, in two short runs.

The programs are those of the pages in docs/recipes, which `tests/test_recipes.py` runs on Reel.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing import SAEDictionary
from rlhf_lab.probes import Run
from rlhf_lab.training import RLHFTrainer
from tests.pages import page

pytestmark = pytest.mark.slow
LAYER, HEAD, SITE = 4, 2, "blocks.20.hook_resid_post"


def programs(recipe: str) -> SimpleNamespace:
    """The functions that a recipe's page defines, without what it does with them on Reel."""
    (body,) = re.findall(r"^```python\n(.*?)^```$", page(f"recipes/{recipe}"), re.M | re.S)
    defined = {"__name__": recipe}
    exec(compile(body, f"{recipe}.md", "exec"), defined)
    return SimpleNamespace(**defined)


class StandInSAE(nn.Module):
    """What `SAEDictionary` asks of SAELens: cfg.metadata, dtype, encode, decode, W_dec."""

    dtype = torch.float32

    def __init__(self, d_in: int, d_sae: int) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(metadata=SimpleNamespace(hook_name=SITE))
        noise = torch.randn(d_in, d_sae, generator=torch.Generator().manual_seed(0))
        self.W_dec = nn.Parameter((noise / noise.norm(dim=0)).T.contiguous())

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.W_dec.T).relu()

    def decode(self, f: Tensor) -> Tensor:
        return f @ self.W_dec


def trainer_of(real_models, out, **overrides):
    """A trainer of SmolLM2 with adapters, as small as a run can be."""
    settings = {
        "base_model": str(real_models / "smollm2"),
        "reward_model": str(real_models / "minilm-sentiment"),
        "lora_rank": 4,
        "batch_size": 4,
        "num_minibatches": 1,
        "gen_len": 5,
        "total_phases": 2,
        "warmup_steps": 0,
        "base_lr": 3e-3,
        "keep_checkpoints": 0,
    }
    return RLHFTrainer(RLHFArgs(preset="smol", **(settings | overrides)), out=out)


@pytest.fixture(scope="module")
def watched(real_models, tmp_path_factory):
    """A run that all watching programs were attached to, with what they gave."""
    trainer = trainer_of(real_models, tmp_path_factory.mktemp("research") / "run")
    tokenizer = trainer.tokenizer
    adjectives = {True: ("great", "good", "fine"), False: ("bad", "awful", "poor")}
    labels = torch.tensor([i % 3 > 0 for i in range(12)])
    nouns = ("film", "plot", "story", "music")
    texts = [
        f"The {nouns[i // 3]} was {adjectives[y][i % 3]}" for i, y in enumerate(labels.tolist())
    ]
    tokens = torch.tensor([tokenizer(text).input_ids for text in texts])
    reader = programs("reader_in_training")
    programs("attention_over_phases").watch_patterns(trainer, tokens)
    reader.read_through_training(trainer, tokens, labels)
    store = programs("store_and_steer").keep_activations(trainer, SITE, mb=0.05)
    dictionary = SAEDictionary(StandInSAE(trainer.policy.base_model.cfg.d_model, 1200))
    programs("sae_dictionary").watch_latents(trainer, dictionary, tokens)
    trainer.train()
    run = Run(trainer.run.path)
    return SimpleNamespace(trainer=trainer, run=run, tokens=tokens, store=store, reader=reader)


def test_patterns_of_smollm2_move_over_phases(watched):
    site = "blocks.20.attn.hook_pattern"
    found = programs("attention_over_phases").patterns_of(watched.run, site)
    assert [phase for phase, _ in found] == [0, 1]
    heads = watched.trainer.policy.base_model.cfg.n_heads
    for _, values in found:
        assert {len(value) for value in values.values()} == {heads}
        assert all(0 <= x <= 1 for value in values.values() for x in value)
    assert max(found[1][1]["moved"]) > 0


def test_a_reader_reads_smollm2_through_training(watched):
    found = dict(watched.reader.readings(watched.run, SITE))
    assert sorted(found) == [0, 1, 2]
    assert found[0]["gap"] == 0 and found[0]["cosine"] == pytest.approx(1)
    assert found[2]["cosine"] < 1
    assert all(check.ok for check in watched.run.checks())


def test_a_bounded_store_has_both_models_of_smollm2(watched):
    store = watched.store
    assert 0 < len(store) < store.seen and store.nbytes <= 0.05 * 2**20
    assert not torch.equal(*store.activations.unbind(1))
    sweep = programs("store_and_steer").steer_base(
        watched.trainer, SITE, {"reward": watched.trainer.reward_fn}, n=2
    )
    assert len(sweep.rows) == 4 and all(check.ok for check in sweep.checks)


def test_latents_of_a_dictionary_are_followed_in_smollm2(watched):
    """With a stand-in that has SAELens's interface, which is not among the dependencies."""
    found = watched.run.returned("latents")
    assert [row["phase"] for row in found] == [0, 1]
    assert all(len(row["latent"]) == 3 and 0 < row["left_out"] for row in found)


def test_the_ends_of_a_run_of_smollm2_are_compared(watched):
    base, policy = watched.trainer.reference, watched.trainer.policy
    found = programs("compare_two_models").what_moved(
        *(base, policy, watched.tokens[:2], (" good", " bad")),
        **{"methods": ("split",), "ranks": (0,), "alphas": (0, 1)},
    )
    assert len(found.parts) == 62 and found.effects["own weights"].value.abs().max() > 0
    assert found.truncated[0].value.abs() < 1e-4  # adapters change no vector
    assert found.line[1.0].value.item() == pytest.approx(found.shift.value.item(), abs=1e-4)
    assert found.shift.value.abs() > 1e-3


def test_a_hook_and_an_ablation_hold_in_all_of_a_run_of_smollm2(real_models, tmp_path):
    trainer = trainer_of(real_models, tmp_path / "run", total_phases=1)
    calls = programs("own_hook").scale(trainer, "blocks.3.hook_mlp_out", 0.9)
    programs("ablate_head").ablate(trainer, LAYER, HEAD)
    seen = {}

    @trainer.capture(f"blocks.{LAYER}.attn.hook_z")
    def ablated(ctx, z):
        seen[ctx.phase] = z.abs().amax((0, 1, 3))

    (report,) = trainer.train()
    assert calls[0, "rollout"] > 0 and calls[0, "learning"] > 0
    assert report.learning.ratio_first_minibatch == pytest.approx(1, abs=1e-3)
    assert seen[0][HEAD] == 0 and (seen[0] > 0).sum() == len(seen[0]) - 1
    names = {record["name"] for record in trainer.run.read_info()["interventions"]}
    assert names == {"scaled", f"without_head_{HEAD}"}
