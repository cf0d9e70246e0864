"""The network while it trains: a Llama written out, with transformers' own parameter names.

Written out rather than taken from transformers because it is compiled as one piece, because the
vocabulary's logits are only computed where the loss looks, and because that loss never holds more
than one slice of them. `export.py` checks that transformers computes the same from the same
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    vocab: int = 8192
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 768
    context: int = 4096
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5
    head_dim: int = 64


class Norm(nn.Module):
    """Root-mean-square norm, in float32 as transformers does it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split order of transformers."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(shape.heads * width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        width = self.shape.head_dim
        q = self.q_proj(x).view(rows, length, -1, width).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, -1, width).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, -1, width).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.shape.heads // self.shape.kv_heads
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Everything but the logits: ids to the last hidden states."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)

    def forward(
        self, ids: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, still: int = 0
    ) -> Tensor:
        """`still` first layers do not train, and the embeddings learn only from what is said."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not still):
            x = self.embed_tokens(ids).to(dtype)
            for layer in self.layers[:still]:
                x = layer(x, cos, sin)
        for layer in self.layers[still:]:
            x = layer(x, cos, sin)
        return self.norm(x)


class TinyLlama(nn.Module):
    """The body under the name `model`; the logits use its embedding (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05 if "embed" in name else 0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                with torch.no_grad():
                    parameter.mul_((2 * shape.layers) ** -0.5)

    def positions(
        self, length: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The rotary cosines and sines for the first `length` places."""
        steps = torch.arange(0, self.shape.head_dim, 2, device=device).float()
        rates = self.shape.rope_theta ** (-steps / self.shape.head_dim)
        angles = torch.arange(length, device=device).float()[:, None] * rates[None]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class SlicedLoss(torch.autograd.Function):
    """Weighted cross-entropy against tied logits, a slice of places at a time.

    The gradients are worked out in the forward pass, while a slice's probabilities are at hand, so
    the full table of logits (places x vocabulary) never exists.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        table: Tensor,
        targets: Tensor,
        weights: Tensor,
        slice_size: int,
    ) -> tuple[Tensor, Tensor]:
        total = weights.sum().clamp_min(1e-6)
        narrow = table.to(hidden.dtype)
        hidden_grad = torch.empty_like(hidden)
        table_grad = torch.zeros_like(table)
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(targets), slice_size):
            part = slice(start, start + slice_size)
            grads = torch.softmax(hidden[part] @ narrow.T, dim=-1)
            right = grads.gather(1, targets[part, None])[:, 0]
            losses[part] = -right.float().clamp_min(1e-30).log()
            grads.scatter_(1, targets[part, None], (right - 1)[:, None])
            grads.mul_((weights[part] / total).to(grads.dtype)[:, None])
            hidden_grad[part] = grads @ narrow
            table_grad += grads.T @ hidden[part]
        ctx.save_for_backward(hidden_grad, table_grad)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum() / total, losses

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_grad, table_grad = ctx.saved_tensors  # type: ignore[attr-defined]
        return hidden_grad * grad.to(hidden_grad.dtype), table_grad * grad, None, None, None
