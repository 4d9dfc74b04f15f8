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
from rlhf_lab.models.fast import why_unknown
from rlhf_lab.models.transformer_lens import FAMILIES, why_not_additive
from rlhf_lab.training import RLHFTrainer
from tests.tiny_families import LLAMA3, LONGROPE, VARIANTS, YARN, random_tokens, tiny_of
from tests.tiny_models import llama_tokenizer, save

HEAD = """\
# Models

The architectures that `models.load_model` reads and `python -m rlhf_lab export` writes, from a hub,
a directory or a loaded model. Each goes through one table of its own, both ways
(`rlhf_lab/models/transformer_lens/families/`), and what was loaded is written again bit for bit.
This page is written by `python -m docs.make_models`. Its figures are of tiny random models with
unusual values in every setting, on texts of 40 tokens where a window has 5:

- **gap**: the largest distance of any logit from that of plain transformers, in all of the variants
  of `tests/tiny_families.py`; the tests allow 1e-4.
- **trained**: after one phase of PPO, how far the log-probs that plain transformers reads of the
  exported policy are from the policy's, weighed by probability, in nats; 1e-4 is allowed.
- **forward**: "packed" where the packed form runs, but for the settings named; else the modules.
- **heads add up**: whether `LogitShift` can split a logit over heads and MLPs; else it declines.

| architecture | such as | gap | trained | forward | heads add up |
|---|---|---|---|---|---|
"""
SETTINGS = """
## Settings

A setting of `config.json` is converted, is without effect on a logit, or is refused by its name, in
one sentence; `python -m pytest tests/models/test_family_refusals.py` goes through them. Rotary
embeddings of a type that is not here are refused, too; `dynamic` ones are those within the context,
and `longrope` ones are read where each short factor is 1, with the context that these are for.
A mixture of experts, quantized weights and image towers are not converted.

| architecture | converted | for these values only | rotary types | with a window |
|---|---|---|---|---|
"""
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
PLAIN = {"rope_theta": 100.0, "partial_rotary_factor": 1.0}
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "dynamic": {"factor": 2.0},
    "longrope": LONGROPE,
}


class Figures(NamedTuple):
    """What is measured of one architecture."""

    gap: float
    trained: float


def page(figures: Mapping[str, Figures]) -> str:
    """The whole page."""
    first = "".join(map(_row, FAMILIES, [figures[name] for name in FAMILIES]))
    return HEAD + first + SETTINGS + "".join(map(_settings, FAMILIES))


def _kinds(architecture: str) -> list[dict]:
    """The changes of all tiny models of an architecture."""
    return [{}, *(changes for name, changes in VARIANTS.values() if name == architecture)]


def _row(architecture: str, figures: Figures) -> str:
    models = [
        load_model(tiny_of(architecture, **c), llama_tokenizer()) for c in _kinds(architecture)
    ]
    whys = [why_unknown(model) for model in models]
    forward = "modules"
    if None in whys:
        named = sorted({why.split("cfg.")[1].split("=")[0] for why in whys if why is not None})
        forward = "packed" + "".join(f"; modules for `{name}`" for name in named)
    why = why_not_additive(models[0])
    cells = f"`{architecture}`", SUCH_AS[architecture], f"{figures.gap:.1e}"
    cells += f"{figures.trained:.1e}", forward, "yes" if why is None else "no"
    return f"| {' | '.join(cells)} |\n"


def _settings(architecture: str) -> str:
    family = FAMILIES[architecture]
    converted = ", ".join(f"`{name}`" for name in sorted(family.converted))
    only = ", ".join(
        f"`{name}={value!r}`" for name, values in family.only.items() for value in values
    )
    ropes = [_ropes(architecture, sliding) for sliding in (False, True)]
    return f"| `{architecture}` | {converted} | {only} | {' | '.join(ropes)} |\n"


def _ropes(architecture: str, sliding: bool) -> str:
    """The rotary types that are converted, with or without a sliding window in some layer."""
    converted = FAMILIES[architecture].converted
    if "rope_parameters" not in converted or (sliding and "sliding_window" not in converted):
        return ""
    found = []
    for kind, given in ROPES.items():
        rope = PLAIN | {"rope_type": kind} | given
        changes: dict = {"sliding_window": 5} if sliding else {"sliding_window": None}
        if not sliding and "layer_types" in converted:
            changes |= {"layer_types": ["full_attention"] * 3}
        if sliding and "use_sliding_window" in converted:
            changes |= {"use_sliding_window": True, "max_window_layers": 1}
        if architecture == "Gemma3ForCausalLM":
            rope = {"full_attention": rope, "sliding_attention": PLAIN | {"rope_type": "default"}}
        try:
            changes |= {"rope_parameters": rope, "head_dim": 4}
            FAMILIES[architecture].settings(tiny_of(architecture, **changes).config)
        except Exception:  # a LoadError; some transformers refuses with an error of its own
            continue
        found.append(f"`{kind}`")
    return ", ".join(found)


def measure(architecture: str) -> Figures:
    """Load, train for one phase, and export."""
    gap = 0.0
    for changes in _kinds(architecture):
        hf_model = tiny_of(architecture, **changes)
        model = load_model(hf_model, llama_tokenizer())
        tokens = random_tokens(length=model.cfg.n_ctx)
        with torch.no_grad():
            gap = max(gap, (model(tokens) - hf_model(tokens).logits).abs().max().item())
    with tempfile.TemporaryDirectory() as place:
        base = save(tiny_of(architecture), llama_tokenizer(), Path(place, "base"))
        sizes = {"total_phases": 1, "warmup_steps": 0, "batch_size": 8, "gen_len": 15}
        args = RLHFArgs(base_model=str(base), reward_fn="count:w1", prefix="w3 w4", **sizes)
        trainer = RLHFTrainer(args, out=Path(place, "run"))
        trainer.train()
        _, agreement = export_policy(trainer.policy, str(base), Path(place, "out"))
    return Figures(gap, agreement.weighed)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = Path(__file__).parent / "models.md"
    path.write_text(page({name: measure(name) for name in FAMILIES}), encoding="utf-8")
    print(f"written: {path}")
