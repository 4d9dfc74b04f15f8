"""The transformer: every operation of the forward pass, with a hook point at every activation.

Start with `HookedTransformer.forward` near the end of the file: it embeds the tokens, runs the
blocks and unembeds. Each `TransformerBlock` runs `Attention` and `MLP`. Functions at the end of the
file compute positions and attention masks.

A hook is a function that reads an activation or returns a replacement for it. An activation `x`
that passes through a hook point, `x = self.hook_q(x)`, is handed to the hooks registered there. The
comment next to each hook point is the shape of the activation. Hook points, weights and `cfg` have
the names of TransformerLens: `self.hook_q` in block 0 is `model.hook_dict["blocks.0.attn.hook_q"]`.

Torch has fused operations for normalization and attention. An `if ... is_hooked` uses them when no
hook needs the activations between their steps. The numbers are the same up to rounding.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule, hook_points
from transformers import PreTrainedTokenizerBase

from rlhf_lab.models.kv_cache import Keys, KVCache, LayerCache
from rlhf_lab.models.model_config import ModelConfig
from rlhf_lab.models.tokenization import Tokenization

Tokens = Int[Tensor, "batch pos"]
Residual = Float[Tensor, "batch pos d_model"]
Logits = Float[Tensor, "batch pos d_vocab"]
Positions = Int[Tensor, "rows query"]
Queries = Float[Tensor, "batch query head d_head"]
Mask = Bool[Tensor, "*batch query key"]  # True where a query may attend to a key
Padding = Bool[Tensor, "batch key"]  # False on padding, for earlier and new tokens
Angles = Float[Tensor, "*batch query 1 rotary_dim"]

MIN_PADDED_ROWS, MIN_PADDED_VOCAB = 64, 1024  # below, padding the weights saves no time
ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def is_hooked(module: nn.Module) -> bool:
    """Return True while the module itself has a forward or backward hook."""
    return bool(
        module._forward_hooks
        or module._backward_hooks
        or module._forward_pre_hooks
        or module._backward_pre_hooks
    )


class HookPoint(hook_points.HookPoint):
    """TransformerLens's `HookPoint`, which costs next to nothing while no hook is registered."""

    is_hooked = property(is_hooked)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            return x
        return super().__call__(x.clone())  # a hook can change its input in place


class AttentionContext(NamedTuple):
    """Attention mask and rotary angles, the same for all layers of a type (global or local)."""

    mask: Mask | None  # None stands for the causal mask
    cos: Angles | None = None  # None without rotary embedding
    sin: Angles | None = None


class Norm(nn.Module):
    """LayerNorm, or RMSNorm, which does not subtract the mean and has no bias."""

    def __init__(self, cfg: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        self.eps, self.size = cfg.eps, size or cfg.d_model
        self.is_centered = {"LN": True, "RMS": False}[cfg.normalization_type]
        self.w = nn.Parameter(torch.ones(self.size, dtype=cfg.dtype))
        if self.is_centered:  # as in TransformerLens, an RMSNorm has no attribute b
            self.b = bias(cfg, self.size)
        self.hook_scale = HookPoint()  # [batch pos 1]
        self.hook_normalized = HookPoint()  # [batch pos d_model]

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        if not (self.hook_scale.is_hooked or self.hook_normalized.is_hooked):
            return self.fused(x, self.w, self.b if self.is_centered else None)
        scaled = self.hook_normalized(self.normalize(x)) * self.w
        return scaled + self.b if self.is_centered else scaled

    def normalize(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        """Subtract the mean (LayerNorm only) and divide by the standard deviation."""
        if not self.hook_scale.is_hooked:
            return self.fused(x)
        centered = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.is_centered:
            centered = centered - centered.mean(-1, keepdim=True)
        scale = self.hook_scale((centered.square().mean(-1, keepdim=True) + self.eps).sqrt())
        return (centered / scale).to(x.dtype)

    def fused(self, x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        """Normalize, multiply by w and add b as one operation of torch."""
        if self.is_centered:
            return F.layer_norm(x, (self.size,), w, b, self.eps)
        return F.rms_norm(x, (self.size,), w, self.eps)


class Attention(nn.Module):
    """Causal self-attention. `kv_head` is `head`, except in `GroupedQueryAttention`."""

    kv_prefix = ""  # of the names of the parameters W_K, W_V, b_K and b_V

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.cfg, self.n_kv_heads = cfg, cfg.n_key_value_heads or cfg.n_heads
        self.W_Q = weight(cfg, cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_O = weight(cfg, cfg.n_heads, cfg.d_head, cfg.d_model)
        self.b_Q, self.b_O = bias(cfg, cfg.n_heads, cfg.d_head), bias(cfg, cfg.d_model)
        for name in "KV":
            W = weight(cfg, self.n_kv_heads, cfg.d_model, cfg.d_head)
            self.register_parameter(f"{self.kv_prefix}W_{name}", W)
            b = bias(cfg, self.n_kv_heads, cfg.d_head)
            self.register_parameter(f"{self.kv_prefix}b_{name}", b)
        if cfg.qk_norm is not None:
            is_joint = cfg.qk_norm == "all"  # normalize all heads together
            self.q_norm = Norm(cfg, cfg.d_head * (cfg.n_heads if is_joint else 1))
            self.k_norm = Norm(cfg, cfg.d_head * (self.n_kv_heads if is_joint else 1))
        self.scale = cfg.attn_scale
        if cfg.scale_attn_by_inverse_layer_idx:
            self.scale *= layer + 1
        self.hook_q = HookPoint()  # [batch query head d_head]
        self.hook_k = HookPoint()  # [batch query kv_head d_head]
        self.hook_v = HookPoint()  # [batch query kv_head d_head]
        if cfg.positional_embedding_type == "rotary":
            self.hook_rot_q = HookPoint()  # [batch query head d_head]
            self.hook_rot_k = HookPoint()  # [batch query kv_head d_head]
        self.hook_attn_scores = HookPoint()  # [batch head query key]
        self.hook_pattern = HookPoint()  # [batch head query key]
        self.hook_z = HookPoint()  # [batch query head d_head]
        self.hook_result = HookPoint()  # [batch query head d_model]

    def forward(self, x: Residual, context: AttentionContext, cache: LayerCache | None) -> Residual:
        q, k, v = self.compute_qkv(x, cache)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if self.cfg.qk_norm is not None:
            q, k = normalize_heads(q, self.q_norm), normalize_heads(k, self.k_norm)
        if context.cos is not None:
            q, k = self.hook_rot_q(rotate(q, context)), self.hook_rot_k(rotate(k, context))
        if cache is not None:
            k, v = cache.append(k, v)
        z = self.hook_z(self.attend(q, k, v, context.mask))
        if self.hook_result.is_hooked:
            result = self.hook_result(torch.einsum("bqhd,hdm->bqhm", z, self.W_O))
            return result.sum(2) + self.b_O
        return linear(z.flatten(2), self.W_O.flatten(0, 1), self.b_O)

    def compute_qkv(self, x: Residual, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute x W_Q + b_Q, x W_K + b_K and x W_V + b_V as one product."""
        is_stored = cache is not None and not torch.is_grad_enabled()
        if is_stored and cache.qkv_projection is None:
            cache.qkv_projection = self.qkv_projection()
        W, b = cache.qkv_projection if is_stored else self.qkv_projection()
        qkv = linear(x, W, b).unflatten(-1, (-1, self.cfg.d_head))
        return qkv.split((self.cfg.n_heads, self.n_kv_heads, self.n_kv_heads), dim=2)

    def qkv_projection(self) -> tuple[Float[Tensor, "d_model qkv"], Float[Tensor, " qkv"]]:
        """Return W_Q, W_K and W_V side by side, and their biases."""
        names = ("W_K", "W_V", "b_K", "b_V")
        W_K, W_V, b_K, b_V = (getattr(self, self.kv_prefix + name) for name in names)
        W = torch.cat([self.W_Q, W_K, W_V]).transpose(0, 1).flatten(1)
        return W, torch.cat([self.b_Q, b_K, b_V]).flatten()

    def attend(self, q: Queries, k: Keys, v: Keys, mask: Mask | None) -> Queries:
        """Compute softmax(q k / scale) v (Vaswani et al. 2017)."""
        cap = self.cfg.attn_scores_soft_cap
        is_hooked = self.hook_attn_scores.is_hooked or self.hook_pattern.is_hooked
        if not (is_hooked or cap > 0):
            return attend_fused(q, k, v, mask, self.scale)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        scores = soft_cap(torch.einsum("bqhd,bkhd->bhqk", q, k) / self.scale, cap)
        mask = causal_mask(q.shape[1], k.shape[1], q.device) if mask is None else mask
        scores = self.hook_attn_scores(scores.masked_fill(~mask, -torch.inf))
        pattern = self.hook_pattern(scores.softmax(-1).to(v.dtype))
        return torch.einsum("bhqk,bkhd->bqhd", pattern, v)


class GroupedQueryAttention(Attention):
    """Attention in which groups of query heads share a key and value head (Ainslie et al. 2023)."""

    kv_prefix = "_"  # the properties W_K etc. repeat the parameters _W_K etc. for each query head
    W_K = property(lambda self: self.repeat(self._W_K))  # [head d_model d_head]
    W_V = property(lambda self: self.repeat(self._W_V))  # [head d_model d_head]
    b_K = property(lambda self: self.repeat(self._b_K))  # [head d_head]
    b_V = property(lambda self: self.repeat(self._b_V))  # [head d_head]

    def repeat(self, shared: Tensor) -> Tensor:
        return shared.repeat_interleave(self.cfg.n_heads // self.n_kv_heads, dim=0)


class MLP(nn.Module):
    """Two linear maps with an activation function between them, or three with a gate."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.act_fn = ACTIVATION_FUNCTIONS[cfg.act_fn]
        self.W_in, self.b_in = weight(cfg, cfg.d_model, cfg.d_mlp), bias(cfg, cfg.d_mlp)
        self.W_out, self.b_out = weight(cfg, cfg.d_mlp, cfg.d_model), bias(cfg, cfg.d_model)
        self.hook_pre = HookPoint()  # [batch pos d_mlp]
        self.is_gated = cfg.gated_mlp
        if self.is_gated:
            self.W_gate = weight(cfg, cfg.d_model, cfg.d_mlp)
            self.hook_pre_linear = HookPoint()  # [batch pos d_mlp]
        self.hook_post = HookPoint()  # [batch pos d_mlp]

    def forward(self, x: Residual) -> Residual:
        if not self.is_gated:
            post = self.act_fn(self.hook_pre(linear(x, self.W_in, self.b_in)))
        else:
            gate = self.act_fn(self.hook_pre(linear(x, self.W_gate)))
            post = gate * self.hook_pre_linear(linear(x, self.W_in)) + self.b_in
        return linear(self.hook_post(post), self.W_out, self.b_out)


class TransformerBlock(nn.Module):
    """Attention, then the MLP; each reads the residual stream and adds to it."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.cfg = cfg
        attention = GroupedQueryAttention if cfg.n_key_value_heads else Attention
        self.ln1, self.attn = Norm(cfg), attention(cfg, layer)
        self.ln2, self.mlp = Norm(cfg), MLP(cfg)
        if cfg.use_normalization_before_and_after:
            self.ln1_post, self.ln2_post = Norm(cfg), Norm(cfg)
        self.hook_resid_pre = HookPoint()  # [batch pos d_model]
        self.hook_attn_out = HookPoint()  # [batch pos d_model]
        if not cfg.parallel_attn_mlp:
            self.hook_resid_mid = HookPoint()  # [batch pos d_model]
        self.hook_mlp_out = HookPoint()  # [batch pos d_model]
        self.hook_resid_post = HookPoint()  # [batch pos d_model]

    def forward(self, x: Residual, context: AttentionContext, cache: LayerCache | None) -> Residual:
        resid_pre = self.hook_resid_pre(x)
        attn_out = self.attn(self.norm_input(self.ln1, resid_pre), context, cache)
        attn_out = self.hook_attn_out(self.norm_output("ln1", attn_out))
        if self.cfg.parallel_attn_mlp:
            mlp_out = self.hook_mlp_out(self.mlp(self.ln2(resid_pre)))
            return self.hook_resid_post(resid_pre + attn_out + mlp_out)
        resid_mid = self.hook_resid_mid(resid_pre + attn_out)
        mlp_out = self.mlp(self.norm_input(self.ln2, resid_mid))
        mlp_out = self.hook_mlp_out(self.norm_output("ln2", mlp_out))
        return self.hook_resid_post(resid_mid + mlp_out)

    def norm_input(self, norm: Norm, x: Residual) -> Residual:
        """Normalize the input of attention or MLP, except in OLMo 2."""
        return x if self.cfg.norms_after else norm(x)

    def norm_output(self, name: str, x: Residual) -> Residual:
        """Normalize the output of attention or MLP in OLMo 2 and Gemma."""
        if self.cfg.norms_after:
            return getattr(self, name)(x)
        if self.cfg.use_normalization_before_and_after:
            return getattr(self, f"{name}_post")(x)
        return x


class Embed(nn.Module):
    """Token embedding."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.W_E = weight(cfg, cfg.d_vocab, cfg.d_model)

    def forward(self, tokens: Tokens) -> Residual:
        try:
            return F.embedding(tokens, self.W_E)
        except IndexError as error:  # on the CPU
            ids = f"ids from {int(tokens.min())} to {int(tokens.max())}, d_vocab={len(self.W_E)}"
            raise IndexError(f"{error}: {ids}. Use the model's tokenizer.") from None


class PosEmbed(nn.Module):
    """Learned position embedding."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.W_pos = weight(cfg, cfg.n_ctx, cfg.d_model)

    def forward(self, positions: Positions) -> Float[Tensor, "rows query d_model"]:
        return F.embedding(positions, self.W_pos)


class Unembed(nn.Module):
    """Map from the final normalized residual stream to a logit for each token."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.W_U, self.b_U = weight(cfg, cfg.d_model, cfg.d_vocab), bias(cfg, cfg.d_vocab)
        self.hook_in = HookPoint()  # [batch pos d_model]
        self.hook_out = HookPoint()  # [batch pos d_vocab]

    def forward(self, x: Residual) -> Logits:
        x, W_U, b_U = self.hook_in(x), self.W_U, self.b_U
        if pads_vocabulary(x.device, x.shape[:-1].numel(), len(b_U)):
            return self.hook_out(linear(x, *pad_vocabulary(W_U, b_U))[..., : len(b_U)])
        return self.hook_out(linear(x, W_U, b_U))


def stacked(name: str) -> property:
    """Return a property of the model that stacks a parameter of all layers."""
    return property(lambda model: torch.stack([attrgetter(name)(b) for b in model.blocks]))


class HookedTransformer(Tokenization, HookedRootModule):
    """A decoder-only transformer with a hook point at every activation.

    Args:
        cfg: sizes and architecture.
        tokenizer: used by `to_tokens` and `to_string`, and for sampling.
    """

    def __init__(self, cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__()
        self.cfg, self.tokenizer = cfg, tokenizer
        self.embed = Embed(cfg)
        self.hook_embed = HookPoint()  # [batch pos d_model]
        if cfg.positional_embedding_type == "standard":
            self.pos_embed = PosEmbed(cfg)
            self.hook_pos_embed = HookPoint()  # [batch pos d_model]
        self.blocks = nn.ModuleList(TransformerBlock(cfg, layer) for layer in range(cfg.n_layers))
        self.ln_final, self.unembed = Norm(cfg), Unembed(cfg)
        self.rotary = cfg.rotary_by_layer_type()
        if cfg.init_weights:
            self.init_weights()
        self.setup()

    def forward(
        self,
        tokens: Tokens | Residual | str | list[str],
        return_type: str | None = "logits",
        *,
        attention_mask: Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"] | None = None,
        past_kv_cache: KVCache | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
    ) -> Float[Tensor, "batch pos out"] | Float[Tensor, ""] | tuple[Tensor, Tensor] | None:
        """Compute the logits of the next token at every position.

        Args:
            tokens: token ids or texts; the residual stream if `start_at_layer` is set.
            return_type: "logits", "loss" (mean cross-entropy of real tokens), "both", or None.
            attention_mask: False or 0 on padding; None without padding.
            past_kv_cache: keys and values of earlier tokens, to which those of `tokens` are added.
            start_at_layer: first layer to run.
            stop_at_layer: layer before which to stop and return the residual stream.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"Unknown {return_type=}. Choose 'logits', 'loss', 'both' or None.")
        if not isinstance(tokens, Tensor):
            tokens = self.to_tokens(tokens)
        tokens = tokens.to(self.embed.W_E.device)
        past = 0 if past_kv_cache is None else past_kv_cache.n_tokens
        mask = padding_mask(tokens, attention_mask, past_kv_cache)
        positions = token_positions(tokens, mask, past)
        contexts = self.attention_contexts(positions, mask, past)
        residual = tokens if start_at_layer is not None else self.embed_tokens(tokens, positions)
        for layer in range(self.cfg.n_layers)[start_at_layer:stop_at_layer]:
            cache = None if past_kv_cache is None else past_kv_cache.entries[layer]
            residual = self.blocks[layer](residual, contexts[self.cfg.layer_type(layer)], cache)
        if stop_at_layer is not None:
            return residual
        normalized = self.ln_final(residual.to(self.unembed.W_U.device))
        if return_type is None:
            return None
        logits = soft_cap(self.unembed(normalized), self.cfg.output_logits_soft_cap)
        if return_type == "logits":
            return logits
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask
        targets = tokens[:, 1:].masked_fill((real[:, :-1] * real[:, 1:]) == 0, -100)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        return loss if return_type == "loss" else (logits, loss)

    def embed_tokens(self, tokens: Tokens, positions: Positions) -> Residual:
        """Compute the residual stream before the first block."""
        residual = self.hook_embed(self.embed(tokens))
        if self.cfg.positional_embedding_type == "standard":
            pos_embed = self.pos_embed(positions).expand_as(residual)
            residual = residual + self.hook_pos_embed(pos_embed)
        return residual

    def attention_contexts(
        self, positions: Positions, padding: Padding | None, past: int
    ) -> dict[str, AttentionContext]:
        """Compute mask and rotary angles for each type of layer, after `past` earlier tokens."""
        contexts, n_query = {}, positions.shape[1]
        for layer_type in set(self.cfg.attn_types or ["global"]):
            window = self.cfg.window_size if layer_type == "local" else None
            mask = attention_mask(n_query, past, padding, window, positions.device)
            angles = self.rotary_angles(positions, layer_type)
            contexts[layer_type] = AttentionContext(mask, *angles)
        return contexts

    def rotary_angles(self, positions: Positions, layer_type: str) -> tuple[Angles, ...]:
        """Compute cosines and sines in float32; return () if the model has no rotary embedding."""
        if self.cfg.positional_embedding_type != "rotary":
            return ()
        frequencies, scale = self.rotary[layer_type]
        angles = (positions[..., None, None] * frequencies).repeat(1, 1, 1, 2)
        return angles.cos() * scale, angles.sin() * scale

    def run_with_cache(
        self, *inputs: Any, names_filter: Any = None, return_cache_object: bool = True, **more: Any
    ) -> Any:
        """Return the output and the activations, except at `hook_result`, unless it is selected."""
        names_filter = names_filter or is_cached_by_default
        output, activations = super().run_with_cache(*inputs, names_filter=names_filter, **more)
        return output, ActivationCache(activations, self) if return_cache_object else activations

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Sum the output biases before a layer, or before its MLP (for `ActivationCache`)."""
        biases = [block.attn.b_O for block in self.blocks[: layer + mlp_input]]
        if include_mlp_biases:
            biases += [block.mlp.b_out for block in self.blocks[:layer]]
        return sum(biases, torch.zeros_like(self.blocks[0].attn.b_O))

    def init_weights(self) -> None:
        """Draw all matrices from a normal distribution, in the same order as TransformerLens."""
        for name, parameter in self.named_parameters():
            if "W_" in name:
                nn.init.normal_(parameter, std=self.cfg.initializer_range)

    def to(self, *args: Any, print_details: bool = False, **kwargs: Any) -> "HookedTransformer":
        """Move or cast the model. `print_details` is accepted for TransformerLens and ignored."""
        return super().to(*args, **kwargs)

    def _apply(self, fn: Callable, recurse: bool = True) -> "HookedTransformer":
        super()._apply(fn, recurse)
        device, dtype = self.unembed.W_U.device, self.unembed.W_U.dtype
        self.cfg.device, self.cfg.dtype = str(device), dtype
        self.rotary = {kind: (f.to(device), scale) for kind, (f, scale) in self.rotary.items()}
        return self

    W_E = property(lambda self: self.embed.W_E)  # [d_vocab d_model]
    W_pos = property(lambda self: self.pos_embed.W_pos)  # [n_ctx d_model]
    W_U = property(lambda self: self.unembed.W_U)  # [d_model d_vocab]
    b_U = property(lambda self: self.unembed.b_U)  # [d_vocab]
    W_Q, W_K = stacked("attn.W_Q"), stacked("attn.W_K")  # [layer head d_model d_head]
    W_V, W_O = stacked("attn.W_V"), stacked("attn.W_O")  # W_O: [layer head d_head d_model]
    b_Q, b_K, b_V = stacked("attn.b_Q"), stacked("attn.b_K"), stacked("attn.b_V")
    W_in, W_out = stacked("mlp.W_in"), stacked("mlp.W_out")  # [layer d_in d_out]
    b_O, b_in, b_out = stacked("attn.b_O"), stacked("mlp.b_in"), stacked("mlp.b_out")


def is_cached_by_default(name: str) -> bool:
    return not name.endswith("hook_result")


def linear(
    x: Float[Tensor, "*batch d_in"], W: Float[Tensor, "d_in d_out"], b: Tensor | None = None
) -> Float[Tensor, "*batch d_out"]:
    """Compute x W + b."""
    return F.linear(x, W.T, b)


def pads_vocabulary(device: torch.device, n_rows: int, d_vocab: int) -> bool:
    """Return True for a product that is several times faster on CUDA with a padded vocabulary."""
    is_large = n_rows >= MIN_PADDED_ROWS and d_vocab >= MIN_PADDED_VOCAB
    return device.type == "cuda" and is_large and d_vocab % 64 > 0


def pad_vocabulary(
    W_U: Float[Tensor, "d_model d_vocab"], b_U: Float[Tensor, " d_vocab"]
) -> tuple[Float[Tensor, "d_model padded"], Float[Tensor, " padded"]]:
    """Append tokens of probability 0 (zero weights, a bias of -inf) up to a multiple of 64."""
    gap = (0, -len(b_U) % 64)
    return F.pad(W_U, gap), F.pad(b_U, gap, value=-torch.inf)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Limit x smoothly to (-cap, cap) if cap is positive (Gemma 2)."""
    return cap * (x / cap).tanh() if cap > 0 else x


def attend_fused(q: Queries, k: Keys, v: Keys, mask: Mask | None, scale: float) -> Queries:
    """Compute `Attention.attend` as one operation, without second derivatives on the CPU."""
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and q.shape[1] > 1,
        scale=1 / scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def normalize_heads(x: Queries, norm: Norm) -> Queries:
    """Normalize queries or keys, each head separately or all heads together."""
    return norm(x) if norm.size == x.shape[-1] else norm(x.flatten(2)).view_as(x)


def rotate(x: Queries, context: AttentionContext) -> Queries:
    """Rotate pairs of dimensions by the angles of each position (RoPE, Su et al. 2021)."""
    rotary_dim = context.cos.shape[-1]
    rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotary.chunk(2, dim=-1)
    rotated = rotary * context.cos + torch.cat([-second, first], -1) * context.sin
    rotated = rotated.to(x.dtype)
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


def padding_mask(tokens: Tensor, mask: Tensor | None, cache: KVCache | None) -> Padding | None:
    """Return the padding mask of earlier and new tokens; None if no token is padding."""
    if mask is not None:
        mask = None if bool(mask.all()) else mask.bool().to(tokens.device)
    return mask if cache is None else cache.append_mask(mask, tokens)


def token_positions(tokens: Tensor, mask: Padding | None, past: int) -> Positions:
    """Return the position of each new token, counted from the first token of its text."""
    if mask is None:
        return torch.arange(past, past + tokens.shape[1], device=tokens.device)[None]
    return (mask.cumsum(1) - 1).clamp(min=0)[:, past:]


def causal_mask(n_query: int, n_key: int, device: torch.device) -> Mask:
    """Return the mask with which the last `n_query` tokens attend to themselves and before."""
    return torch.ones(n_query, n_key, dtype=torch.bool, device=device).tril(n_key - n_query)


def attention_mask(
    n_query: int, past: int, padding: Padding | None, window: int | None, device: torch.device
) -> Mask | None:
    """Return the mask of a layer, whose window has `window` tokens; None if it is only causal."""
    is_short = window is None or past + n_query <= window
    if padding is None and is_short and (past == 0 or n_query == 1):
        return None
    mask = causal_mask(n_query, past + n_query, device)
    if not is_short:
        mask = mask.triu(past - window + 1)
    if padding is not None:
        itself = torch.eye(past + n_query, dtype=torch.bool, device=device)[past:]
        mask = mask & (padding[:, None, None] | itself)  # padding attends to itself: no nan
    return mask


def weight(cfg: ModelConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=cfg.dtype))


def bias(cfg: ModelConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=cfg.dtype))
