"""Small Reel runs with probes, and the pieces that they share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead, load_model
from rlhf_lab.probes import (
    Direction,
    LogitShift,
    ReelTruth,
    Run,
    ValueLens,
    WeightDelta,
    attach,
    default_suite,
)
from rlhf_lab.training import RLHFTrainer
from tests import small_runs
from tests.probes.looking import Trained, adapted_run, grouped_run, padded_run
from tests.tiny_families import random_tokens, tiny_of
from tests.tiny_models import randomize, save

SMALL = small_runs.SMALL | {"reward_fn": "true_reward"}


@pytest.fixture(scope="session")
def model() -> HookedTransformer:
    return load_model("reel-nano")


@pytest.fixture
def reel_policy(model: HookedTransformer) -> TransformerWithValueHead:
    """The bundled policy with a value head whose estimates differ from state to state."""
    policy = TransformerWithValueHead(model)
    randomize(policy.value_head, 3)
    return policy


@pytest.fixture(scope="session")
def truth() -> ReelTruth:
    return ReelTruth()


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., RLHFTrainer]:
    made = []

    def make(parts: dict[str, Any] | None = None, **overrides: Any) -> RLHFTrainer:
        made.append(tmp_path / f"run{len(made)}")
        return RLHFTrainer(RLHFArgs(**(SMALL | overrides)), out=made[-1], **(parts or {}))

    return make


@pytest.fixture
def elsewhere_with(model_dir: Path, tmp_path: Path) -> Callable[..., RLHFTrainer]:
    """A run of a tiny model that does not speak Reel."""

    def make(name: str = "run", prompts: list[str] | None = None, **changes: Any) -> RLHFTrainer:
        fields = {"base_model": str(model_dir), "reward_fn": "count:w1", "prefix": "w3 w4"}
        fields |= {"total_phases": 3, "warmup_steps": 1, "batch_size": 8, "num_minibatches": 2}
        fields |= {"gen_len": 5, "base_lr": 3e-3, "lora_rank": 2}
        return RLHFTrainer(RLHFArgs(**(fields | changes)), out=tmp_path / name, prompts=prompts)

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of three phases with LogitShift and the default suite, all of which see phase 0."""
    path = tmp_path_factory.mktemp("probed") / "run"
    trainer = RLHFTrainer(RLHFArgs(**(SMALL | {"total_phases": 3, "gen_len": 26})), out=path)
    suite = default_suite(trainer)
    large = Direction(every=3), ValueLens(every=3), WeightDelta(every=3)
    probes = [probe for probe in suite.probes if probe.events != ("run_end",)]
    probes.append(LogitShift(pos=ReelTruth().grammar.slot("VERB") - 1, n=16))
    attach(trainer, *probes, *large, eval_tokens=suite.eval_tokens, labels=suite.labels)
    trainer.train()
    return Run(path)


@pytest.fixture(scope="session")
def reviews(truth: ReelTruth) -> tuple[Tensor, Tensor]:
    """Reviews and their sentiment."""
    return truth.reviews(12, seed=5)


@pytest.fixture(scope="session")
def trained_runs(
    tmp_path_factory: pytest.TempPathFactory, llama_tokenizer
) -> Callable[[str], Trained]:
    """Short runs that are over, each made once: on Reel with adapters, on Reel from prompts of
    unequal length, and a tiny Llama (grouped heads, rotary positions, RMS norms) with such texts.
    """

    def grouped(place: Path) -> Trained:
        save(tiny_of("LlamaForCausalLM"), llama_tokenizer, place / "model")
        tokens = random_tokens()
        mask = torch.arange(tokens.shape[1]) < torch.tensor([40, 31, 12])[:, None]
        return grouped_run(place, place / "model", tokens, mask)

    kinds = {"adapted": adapted_run, "padded": padded_run, "grouped": grouped}

    @functools.cache
    @torch.enable_grad()
    def made(kind: str) -> Trained:
        return kinds[kind](tmp_path_factory.mktemp(kind))

    return made
