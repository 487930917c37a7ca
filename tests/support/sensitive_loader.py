"""vLLM's load format "sensitive": random weights whose outputs depend on the KV cache.

With vLLM's dummy weights the output does not depend on the KV cache: rounding removes what a layer
adds, and a token depends only on the token before it. The weights here have the usual initial size,
with queries three times as large, so that attention selects few tokens, and with Mamba layers that
remember hundreds of tokens. They are the same in each process. Import this module in the process
that configures the engine, and name SensitiveLoading as its worker_extension_cls.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

# Standard deviations of weights.
USUAL, QUERIES, CONVOLUTION = 0.02, 0.06, 0.3
QUERY_NAMES = "q_proj.weight", "q_b_proj.weight"


class SensitiveLoading:
    """Methods that vLLM adds to its workers, which import this module for it."""

    def fill_again(self) -> None:
        """Load the weights again, after sleep of level 2."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        fill_all(model)


@register_model_loader("sensitive")
class SensitiveLoader(BaseModelLoader):
    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        fill_all(model)


def fill_all(model: torch.nn.Module) -> None:
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if parameter.dim() > 0 and parameter.is_floating_point():
            fill(name, parameter.data, modules[name.rpartition(".")[0]])


def fill(name: str, weight: torch.Tensor, module: torch.nn.Module) -> None:
    """Fill a parameter of `module`, in place."""
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    kind = name.rpartition(".")[2]
    if kind in {"A", "A_log"}:  # a state keeps 0.5 to 0.98 of itself for a token, with dt_bias
        decay = torch.empty_like(weight, dtype=torch.float32)
        decay.uniform_(0.2, 1.0, generator=generator)
        weight.copy_(-decay if kind == "A" else decay.log())
    elif kind == "dt_bias":
        weight.uniform_(-4.0, -1.0, generator=generator)
    elif kind == "D" or (weight.dim() == 1 and kind == "weight"):
        # Gemma's norms add 1 to their weights.
        weight.fill_(0.0 if "Gemma" in type(module).__name__ else 1.0)
    elif weight.dim() == 1:  # other biases
        weight.zero_()
    elif "conv1d" in name:
        weight.normal_(0.0, CONVOLUTION, generator=generator)
    else:
        weight.normal_(0.0, USUAL, generator=generator)
        if name.endswith(QUERY_NAMES):
            weight.mul_(QUERIES / USUAL)
        elif isinstance(module, QKVParallelLinear):
            weight[: module.num_heads * module.head_size].mul_(QUERIES / USUAL)
