"""How often a phase asks the device for a number, for which a GPU has to finish its queue first.

What counts is what would make CUDA wait: reading numbers, and shapes that depend on them.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_lab.training import ReplayMemory
from rlhf_lab.training.ppo import score_samples
from rlhf_lab.training.rollout import summarize
from tests.refusing_device import READS

COPIES = (Tensor.tolist, Tensor.numpy, Tensor.cpu)


class _Operations(TorchDispatchMode):
    """Sees what runs below Python: a number taken out of a tensor, an index by a mask."""

    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in READS or func.__name__ in READS:
            self.found[name] += 1
        if name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        ):
            self.found["index by a mask"] += 1
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    """Sees what hands a whole tensor to the host, which on a CPU runs no operation."""

    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in COPIES:
            self.found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def host_reads(run: Callable[[], object]) -> Counter:
    """What a call asks the device for, by kind."""
    found = Counter()
    with _Operations(found), _Copies(found):
        run()
    return found


x = torch.tensor([1.0, 0.0])
KINDS = {
    "item": lambda: x[0].item(),
    "float": lambda: float(x[0]),
    "if": lambda: bool(x[0] > 0),
    "tolist": lambda: x.tolist(),
    "numpy": lambda: x.numpy(),
    "cpu": lambda: x.cpu(),
    "index by a mask": lambda: x[x > 0],
    "assign by a mask": lambda: x.clone().__setitem__(x > 0, x[:1]),
    "nonzero": lambda: x.nonzero(),
    "equal": lambda: torch.equal(x, x),
    "unique": lambda: x.unique(),
    "unique rows": lambda: x[None].unique(dim=0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_counter_sees_every_kind_of_reading(kind):
    assert host_reads(KINDS[kind]).total() == 1


def test_the_counter_leaves_alone_what_stays_on_the_device():
    def stay() -> Tensor:
        return torch.where(x > 0, x, 0.0).sum() + x[torch.tensor([0])] + x[0:1].repeat_interleave(2)

    assert not host_reads(stay)


ONE_TRIP = {
    "plain": {},
    "more minibatches": {"num_minibatches": 8},
    "more passes": {"batches_per_learning_phase": 5},
    "longer": {"gen_len": 20},
    "micro-batches": {"micro_batch_size": 1},
    "truncated": {"top_k": 5},
    "bf16": {"precision": "bf16"},
    "clipped values": {"vf_clip": 0.1},
    "clip-higher": {"clip_coef_high": 0.3, "dual_clip": 3.0},
    "gspo": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"},
    "cispo": {"policy_loss": "cispo", "loss_aggregation": "constant"},
    "sampled KL": {"kl_estimator": "k3"},
    "KL in the reward": {"kl_in": "reward"},
    "held ratios": {"max_log_ratio": 1.0},
    "unclipped": {"max_grad_norm": None},
    "step in backward": {"max_grad_norm": None, "optimizer_in_backward": True},
    "recomputed": {"activation_checkpointing": True},
    "adapters": {"lora_rank": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", ONE_TRIP.values(), ids=ONE_TRIP.keys())
def test_a_learning_phase_reads_its_numbers_once(make_trainer, fields):
    """Whether prompts are padded, at its beginning, and all statistics, at its end."""
    trainer = make_trainer(**fields)
    rollout = trainer.rollout_phase()
    found = host_reads(lambda: trainer.learning_phase(rollout))
    assert found == Counter({"_local_scalar_dense": 1, "tolist": 1})


@pytest.mark.slow
def test_unequal_prompts_take_no_more_reading(make_trainer):
    trainer = make_trainer({"prompts": ["this movie", "the film was", "this film"]})
    rollout = trainer.rollout_phase()
    assert next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator())).padded
    assert host_reads(lambda: trainer.learning_phase(rollout)).total() == 2


@pytest.mark.slow
@pytest.mark.parametrize("field", ["target_kl", "ratio_threshold"])
def test_limits_on_the_ratio_read_once_per_minibatch(make_trainer, field):
    """The host decides whether to step: 4 minibatches, 4 readings more."""
    trainer = make_trainer(**{field: 1e6})
    rollout = trainer.rollout_phase()
    assert host_reads(lambda: trainer.learning_phase(rollout)).total() == 2 + 4


@pytest.mark.slow
def test_who_listens_to_the_step_has_the_norm_read_for_it(make_trainer):
    trainer, norms = make_trainer(), []
    trainer.on("after_step")(lambda ctx: norms.append(ctx.grad_norm))
    rollout = trainer.rollout_phase()
    assert host_reads(lambda: trainer.learning_phase(rollout)).total() == 2 + 4
    assert [type(norm) for norm in norms] == [float] * 4


def sampling_reads(make_trainer: Callable, **fields) -> int:
    trainer = make_trainer(**fields)
    prompts = trainer.next_prompts()
    trainer.sample(prompts, torch.Generator())  # with the longer proof of a run's first phase
    return host_reads(lambda: trainer.sample(prompts, torch.Generator())).total()


@pytest.mark.slow
def test_sampling_reads_as_often_for_long_texts_as_for_short_ones(make_trainer):
    short, long = (sampling_reads(make_trainer, gen_len=n, stop_at_eos=False) for n in (4, 20))
    assert short == long <= 4


@pytest.mark.slow
def test_sampling_that_may_stop_reads_once_per_token_more(make_trainer):
    """Whether all rows have stopped, which decides whether another token is written."""
    running = sampling_reads(make_trainer, gen_len=4, stop_at_eos=False)
    assert sampling_reads(make_trainer, gen_len=4, stop_at_eos=True) == running + 3


@pytest.mark.slow
def test_scoring_reads_as_often_for_a_large_batch_as_for_a_small_one(make_trainer):
    """Tokens and masks have to reach the reward function as texts; statistics are read once."""
    counts = {}
    for batch_size in (8, 32):
        trainer = make_trainer(
            {"reward_fn": lambda texts: torch.ones(len(texts))}, batch_size=batch_size
        )
        trainer.rewards.check_grammar, trainer.rewards.true_reward_fn = False, None
        trainer.train()
        samples = trainer.sample(trainer.next_prompts(), torch.Generator())
        score = lambda trainer=trainer, samples=samples: summarize(score_samples(trainer, samples))
        counts[batch_size] = host_reads(score)
    assert counts[8] == counts[32] and counts[8].total() <= 11  # one of the CPU: token ids


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_learning_phase_on_cuda_waits_for_the_device_a_few_times_at_most(make_trainer, recwarn):
    """As torch itself counts it: the order of the rows, the padding, the statistics."""
    waits = []
    for passes in (2, 6):
        trainer = make_trainer(device="cuda", batches_per_learning_phase=passes)
        rollout = trainer.rollout_phase()
        trainer.learning_phase(rollout)
        recwarn.clear()
        torch.cuda.set_sync_debug_mode("warn")
        trainer.learning_phase(rollout)
        torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(w.message) for w in recwarn.list))
    assert waits[0] == waits[1] <= 4
