"""The decoder-only language model: embedding, blocks, norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm.mixers.base import MixerState, TokenMixer
from llm.model.block import Block
from llm.model.precision import widen
from llm.model.residual import STANDARD, VALUE_ROUTING, Residual
from mixer_kernels.segments import Segments

VOCAB_MULTIPLE = 128  # tensor cores want the head's rows in multiples


class DecoderOutput(NamedTuple):
    """`hidden` [B, T, D] after the final norm; `state`, a dictionary a layer (None unless asked for); `aux` losses."""

    hidden: Tensor
    state: list[MixerState] | None
    aux: dict[str, Tensor]


class Decoder(nn.Module):
    """A stack of pre-norm blocks, one for each of `mixers`.

    `vocab_size` is the tokenizer's; embedding and head have it padded to a multiple of 128, and the padded entries take
    no part in loss or sampling. The head's matrix product belongs to the loss (`llm/loss.py`), or to `logits`.
    `checkpointing` of activations: see `Block`; `residual`: see `Residual`.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        mixers: Sequence[TokenMixer],
        mlp_width: int,
        *,
        tie_embeddings: bool = False,
        norm_eps: float = 1e-6,
        init_std: float = 0.02,
        checkpointing: str = "none",
        residual: str = STANDARD,
    ) -> None:
        super().__init__()
        self.vocab_size, self.init_std = vocab_size, init_std
        self.padded_vocab_size = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.embeddings = nn.Embedding(self.padded_vocab_size, d_model)
        self.residual = Residual(residual, d_model, len(mixers), norm_eps)
        if residual == VALUE_ROUTING:
            for mixer in mixers:
                mixer.route_values()
        self.layers = nn.ModuleList(Block(d_model, mixer, mlp_width, norm_eps, checkpointing) for mixer in mixers)
        self.norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.lm_head = nn.Linear(d_model, self.padded_vocab_size, bias=False)
        if tie_embeddings:
            self.lm_head.weight = self.embeddings.weight

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [W padded, D]."""
        return self.lm_head.weight

    def forward(
        self,
        tokens_BT: Tensor,
        segments: Segments | None = None,
        state: list[MixerState] | None = None,
        *,
        return_state: bool = False,
    ) -> DecoderOutput:
        """Hidden states of rows of tokens, int64 [B, T].

        Without `segments` a row is one document, which continues from `state` where there is one.
        """
        if segments is None:
            segments = Segments.whole_rows(*tokens_BT.shape, tokens_BT.device, continued=state is not None)
        stream, new_state, aux = self.residual.begin(self._embed(tokens_BT)), [], {}
        for i, layer in enumerate(self.layers):
            x_BTD, layer_state, layer_aux = layer(
                stream.enter(), segments, None if state is None else state[i], return_state=return_state
            )
            stream.leave(x_BTD)
            new_state.append(layer_state)
            aux |= {f"layers.{i}.{name}": value for name, value in layer_aux.items()}
        return DecoderOutput(self.norm(stream.enter()), new_state if return_state else None, aux)

    def step(self, tokens_B: Tensor, state: list[MixerState]) -> tuple[Tensor, list[MixerState]]:
        """One more token of each row: logits [B, W] in fp32 and the new state."""
        stream, new_state = self.residual.begin(self._embed(tokens_B)), []
        for layer, layer_state in zip(self.layers, state, strict=True):
            x_BD, layer_state = layer.step(stream.enter(), layer_state)
            stream.leave(x_BD)
            new_state.append(layer_state)
        return self.logits(self.norm(stream.enter())), new_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., W], at least fp32, without the padded entries."""
        logits = F.linear(hidden, self.head_weight.to(hidden.dtype))[..., : self.vocab_size]
        return widen(logits)

    def init_state(
        self, batch: int, max_context: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> list[MixerState]:
        """The state of every layer before the first token."""
        return [layer.mixer.init_state(batch, max_context, device, dtype) for layer in self.layers]

    def state_bytes(self, context: int) -> int:
        """Bytes of state of one sequence after `context` tokens."""
        return sum(layer.mixer.state_bytes(context) for layer in self.layers)

    def flops(self, tokens: int, sum_len_squared: int) -> int:
        """Matrix-multiply FLOPs of a forward pass, the head included, over documents of `tokens` tokens in all."""
        layers = sum(b.mixer.flops(tokens, sum_len_squared) + b.mlp.flops(tokens) for b in self.layers)
        return layers + 2 * tokens * self.head_weight.numel()

    def non_embedding_parameters(self) -> int:
        """Parameters of the blocks, of what is between them, and of the final norm."""
        return sum(p.numel() for part in (self.layers, self.residual, self.norm) for p in part.parameters())

    def reset_parameters(self) -> None:
        """Draw all weights anew from torch's global generator."""
        nn.init.normal_(self.embeddings.weight, std=self.init_std)
        nn.init.normal_(self.lm_head.weight, std=self.init_std)
        self.norm.reset_parameters()
        self.residual.reset_parameters()
        for layer in self.layers:
            layer.reset_parameters(self.init_std)

    def _embed(self, tokens: Tensor) -> Tensor:
        """[..] -> [.., D]. The residual stream is fp32 or better even where the embedding is stored in 16 bits."""
        return widen(self.embeddings(tokens))
