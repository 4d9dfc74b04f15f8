"""TRL's experimental PPOTrainer (1.12) as a contestant.

Its value function is a second model of the same size. It samples from the whole vocabulary, its KL
is estimated from the sampled tokens and inside the reward, and it does not clip gradients. Gradient
checkpointing, on by default, is off as with all contestants.
"""

import tempfile
import threading
from collections.abc import Callable
from types import SimpleNamespace

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.peer import count, encode_prompt, load_tokenizer
from benchmarks.worker import Clock, Setup, serve

ENDLESS = 1_000_000


class CountingReward(nn.Module):
    """The rule as a reward model, which this trainer requires: a backbone and a score."""

    base_model_prefix = "backbone"

    def __init__(self, setup: Setup, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.setup, self.tokenizer = setup, tokenizer

    def backbone(self, input_ids: Tensor, **unused: object) -> SimpleNamespace:
        """Return the counts at every position."""
        rewards = torch.tensor(count(self.setup, self.tokenizer.batch_decode(input_ids)))
        hidden = rewards[:, None, None].expand(*input_ids.shape, 1)
        return SimpleNamespace(hidden_states=[hidden.to(input_ids.device)])

    def score(self, hidden: Tensor) -> Tensor:
        """Return the counts unchanged."""
        return hidden


class OnePhaseAtATime(TrainerCallback):
    """A callback that pauses `train()` after every update until the next request."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def on_train_begin(self, args, state, control, **unused) -> None:
        """Wait for the first phase."""
        self.go.acquire()

    def on_step_end(self, args, state, control, **unused) -> None:
        """Report that a phase is over, and wait for the next."""
        self.done.release()
        self.go.acquire()


def make_trainer(setup: Setup, pause: OnePhaseAtATime) -> PPOTrainer:
    """Make the trainer, with the minibatches and passes of the others."""
    batch = setup["batch_size"]
    args = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_mini_batches=setup["num_minibatches"],
        num_ppo_epochs=setup["passes"],
        local_rollout_forward_batch_size=batch,
        response_length=setup["gen_len"],
        temperature=1.0,
        total_episodes=ENDLESS * batch,
        learning_rate=2e-5,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=setup["device"] == "cpu",
        seed=setup["seed"],
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = load_tokenizer(setup)
    policy, reference = (AutoModelForCausalLM.from_pretrained(setup["model"]) for _ in range(2))
    value_model = AutoModelForSequenceClassification.from_pretrained(setup["model"], num_labels=1)
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=CountingReward(setup, tokenizer),
        train_dataset=Dataset.from_dict({"input_ids": [encode_prompt(setup, tokenizer)] * batch}),
        value_model=value_model,
        callbacks=[pause],
    )


def load(setup: Setup) -> Callable[[Clock], None]:
    """Start a trainer in a separate thread; returns a function that runs one update."""
    pause = OnePhaseAtATime()
    trainer = make_trainer(setup, pause)
    clocks: list[Clock] = []

    def lap_once(stage: str) -> Callable[..., None]:
        def hook(*unused: object) -> None:
            if stage not in clocks[-1].stages:
                clocks[-1].lap(stage)

        return hook

    trainer.ref_model.register_forward_pre_hook(lap_once("rollout/sampling"))
    trainer.model.register_forward_pre_hook(lap_once("rollout/scoring"))
    thread = threading.Thread(target=trainer.train, daemon=True)
    thread.start()

    def phase(clock: Clock) -> None:
        clocks[:] = [clock]
        pause.go.release()
        while not pause.done.acquire(timeout=1.0):
            if not thread.is_alive():
                raise SystemExit("train() ended by itself")
        clock.lap("learning/steps")

    return phase


if __name__ == "__main__":
    serve(load, ("torch", "transformers", "trl", "accelerate"))
