"""Reads of numbers from the device in a phase, for which a GPU must finish its queue.

Reads are what makes CUDA wait: numbers, and shapes that depend on them.
"""

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_lab.training import ReplayMemory

pytestmark = pytest.mark.slow

READS = set(  # operations that return a number to the host, or a shape that depends on numbers
    "_local_scalar_dense equal nonzero masked_select _unique _unique2 unique_dim "
    "unique_consecutive repeat_interleave.Tensor".split()
)


class Reads(TorchDispatchMode):
    """Counts numbers and shapes that are read from a tensor, and indices by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in READS or func.__name__ in READS:
            self.found[name] += 1
        if name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        ):
            self.found["index by a mask"] += 1
        return func(*args, **(kwargs or {}))


def host_reads(run: Callable[[], object]) -> Counter:
    """Return what a call reads from the device, by kind; copies run no operation on a CPU."""
    with pytest.MonkeyPatch.context() as patch, Reads() as reads:
        for copy in ("tolist", "numpy", "cpu"):
            original = getattr(Tensor, copy)

            def counted(x, *args, original=original, copy=copy):
                reads.found[copy] += 1
                return original(x, *args)

            patch.setattr(Tensor, copy, counted)
        run()
    return reads.found


ONE_READ = [
    {"num_minibatches": 4, "batches_per_learning_phase": 3, "top_k": 5, "vf_clip": 0.1},
    {"micro_batch_size": 1, "precision": "bf16", "clip_coef_high": 0.3, "dual_clip": 3.0},
    {"policy_loss": "gspo", "loss_aggregation": "sequence_mean", "kl_estimator": "k3"},
    {"policy_loss": "cispo", "loss_aggregation": "constant", "kl_in": "reward", "lora_rank": 2},
    {"max_grad_norm": None, "optimizer_in_backward": True, "activation_checkpointing": True},
    {"target_kl": 1e6},
    {"ratio_threshold": 1e6},
]


@pytest.mark.parametrize("fields", ONE_READ, ids=str)
def test_learning_phase_reads_its_numbers_once(make_trainer, fields):
    """At its start, whether prompts are padded; at its end, all statistics.

    With a limit, the host also decides in each of 4 minibatches whether to step.
    """
    trainer = make_trainer({"prompts": ["this movie", "the film was", "this film"]}, **fields)
    rollout = trainer.rollout_phase()
    assert next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator())).padded
    found = host_reads(lambda: trainer.learning_phase(rollout))
    n_decisions = 4 * bool({"target_kl", "ratio_threshold"} & fields.keys())
    assert found == Counter({"_local_scalar_dense": 1 + n_decisions, "tolist": 1})


def sampling_reads(make_trainer: Callable, **fields) -> int:
    trainer = make_trainer(**fields)
    prompts = trainer.next_prompts()
    trainer.sample(prompts, torch.Generator())  # the first phase verifies the forward pass
    return host_reads(lambda: trainer.sample(prompts, torch.Generator())).total()


def test_sampling_reads_once_per_token_only_if_it_may_stop(make_trainer):
    lengths = [sampling_reads(make_trainer, gen_len=n, stop_at_eos=False) for n in (4, 20)]
    assert lengths[0] == lengths[1] <= 4
    assert sampling_reads(make_trainer, gen_len=4, stop_at_eos=True) == lengths[0] + 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_learning_phase_on_cuda_waits_a_few_times_at_most(make_trainer):
    waits = []
    for passes in (2, 6):
        trainer = make_trainer(device="cuda", batches_per_learning_phase=passes)
        rollout = trainer.rollout_phase()
        trainer.learning_phase(rollout)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            trainer.learning_phase(rollout)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("called a synchronizing" in str(x.message) for x in caught))
    assert waits[0] == waits[1] <= 4
