"""Writes docs/models.md: every architecture that is loaded, trained and exported, and how exactly.

python -m docs.make_models
"""

import logging
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import load_model
from rlhf_lab.models.export import export_policy
from rlhf_lab.models.families import FAMILIES
from rlhf_lab.models.residual_parts import reason_not_additive
from rlhf_lab.training import RLHFTrainer
from tests.tiny_families import VARIANTS, random_tokens, tiny_of
from tests.tiny_models import llama_tokenizer, save

HEAD = """\
# Models

`models.load_model` loads these architectures from the hub, a directory or a model in memory, and
`python -m rlhf_lab export` writes them back. For tiny, randomly initialized models, *gap* is the
largest logit difference from transformers, and *trained* is the log-prob difference between the
policy and its export after one phase of PPO, in nats, weighted by probability. *Heads add up* means
that the logits are a sum over heads and MLPs, as `LogitShift` requires.

| architecture | such as | gap | trained | heads add up |
|---|---|---|---|---|
"""
SETTINGS = """
## Settings

If an entry in `config.json` is not supported, `load_model` raises an error that names it. All types
of rotary embeddings in transformers work, except that Phi-3 only supports `default` and `longrope`,
and that `linear` cannot be combined with a sliding window outside Gemma 3. `dynamic` works up to
the model's context length, and `longrope` up to the original one if every short factor is 1.
Mixtures of experts, quantized weights and image towers are not supported.
"""
COMPARED = """
## Compared with TransformerLens

You use this package's `HookedTransformer` like the one in TransformerLens (3.9 and 4): weights,
hook points, `cfg`, hooks, `run_with_cache`, `ActivationCache`, `to_tokens` and stacked weights
(`W_Q`, etc.) have the same names and behavior. The policy, `TransformerWithValueHead(model)`, has
the same hook methods, and also accepts a model from TransformerLens 3.9. The differences are:

| in TransformerLens | here |
|---|---|
"""
DIFFERENCES = {
    "`HookedTransformer.from_pretrained(name)`": "`models.load_model(name)`",
    "`fold_ln`, `center_writing_weights`, `center_unembed`": (
        "not available, so `ActivationCache.logit_attrs` and `apply_ln=True` leave out the final "
        "norm's weight and bias"
    ),
    "`generate`": "`sampling.sample(policy, prompts, SamplingSpec(...))`",
    "`loss_per_token=True` of the forward pass": "`functional.get_logprobs` of the logits",
    "`prepend_bos=` of the forward pass": "`model(model.to_tokens(text, prepend_bos=False))`",
    "`OV`, `QK`": (
        "`FactoredMatrix(model.W_V, model.W_O)`, "
        "`FactoredMatrix(model.W_Q, model.W_K.transpose(-2, -1))`"
    ),
    "`W_E_pos`, `all_head_labels`, `get_token_position`, `to_single_str_token`, `loss_fn`, "
    "`get_residual`, composition scores, `padding_side=`": "not available",
    "stacked `W_gate`": "`torch.stack([block.mlp.W_gate for block in model.blocks])`",
    "`use_split_qkv_input`, `use_attn_in`, `use_hook_mlp_in`": (
        "hooks on `attn.hook_q`, `attn.hook_k`, `attn.hook_v` and `ln2.hook_normalized`; "
        "`diffing.patch_path` patches a single head's input"
    ),
    "`use_attn_result`": ("not needed: `attn.hook_result` works whenever you hook or cache it"),
    "hook points of q and k norms: `[batch * pos * head, d_head]`": (
        "`[batch pos head d_head]`; all heads together in OLMo 2"
    ),
    "`isinstance(model, transformer_lens.HookedTransformer)`": (
        "False; for SAELens or circuit-tracer, load what `python -m rlhf_lab export` writes"
    ),
}
SUCH_AS = {
    "GPT2LMHeadModel": "GPT-2, DistilGPT-2, the bundled Reel models",
    "GPTNeoXForCausalLM": "Pythia, GPT-NeoX",
    "LlamaForCausalLM": "Llama 2 and 3, SmolLM2, TinyLlama",
    "MistralForCausalLM": "Mistral 7B",
    "Qwen2ForCausalLM": "Qwen 2 and 2.5",
    "Qwen3ForCausalLM": "Qwen 3",
    "Phi3ForCausalLM": "Phi-3-mini with 4,096 tokens",
    "Gemma2ForCausalLM": "Gemma 2, with transformers 5.21 or newer",
    "Gemma3ForCausalLM": "Gemma 3, text only (270M, 1B)",
    "Olmo2ForCausalLM": "OLMo 2",
}


class Figures(NamedTuple):
    """Measured gaps of one architecture."""

    gap: float
    trained: float


def page(figures: Mapping[str, Figures]) -> str:
    """The whole page."""
    first = "".join(map(_row, FAMILIES, [figures[name] for name in FAMILIES]))
    compared = "".join(f"| {theirs} | {ours} |\n" for theirs, ours in DIFFERENCES.items())
    return HEAD + first + COMPARED + compared + SETTINGS


def _kinds(architecture: str) -> list[dict]:
    """The changes of all tiny models of an architecture."""
    return [{}, *(changes for name, changes in VARIANTS.values() if name == architecture)]


def _row(architecture: str, figures: Figures) -> str:
    why = reason_not_additive(load_model(tiny_of(architecture), llama_tokenizer()))
    cells = f"`{architecture}`", SUCH_AS[architecture], f"{figures.gap:.1e}"
    cells += f"{figures.trained:.1e}", "yes" if why is None else "no"
    return f"| {' | '.join(cells)} |\n"


def measure(architecture: str) -> Figures:
    """Load, train for one phase, and export."""
    gaps = []
    for changes in _kinds(architecture):
        hf_model = tiny_of(architecture, **changes)
        model = load_model(hf_model, llama_tokenizer())
        tokens = random_tokens(length=model.cfg.n_ctx)
        with torch.no_grad():
            gaps.append((model(tokens) - hf_model(tokens).logits).abs().max())
    with tempfile.TemporaryDirectory() as place:
        base = save(tiny_of(architecture), llama_tokenizer(), Path(place, "base"))
        sizes = {"total_phases": 1, "warmup_steps": 0, "batch_size": 8, "gen_len": 15}
        args = RLHFArgs(base_model=str(base), reward_fn="count:w1", prefix="w3 w4", **sizes)
        trainer = RLHFTrainer(args, out=Path(place, "run"))
        trainer.train()
        _, agreement = export_policy(trainer.policy, str(base), Path(place, "out"))
    return Figures(torch.stack(gaps).max().item(), agreement.weighed)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = Path(__file__).parent / "models.md"
    path.write_text(page({name: measure(name) for name in FAMILIES}), encoding="utf-8")
    print(f"written: {path}")
