"""The policy: a causal language model with its tokenizer, on one device."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from trustbatch.errors import ConfigError
from trustbatch.models.config import LoraConfig
from trustbatch.models.loading import (
    context_length_of,
    default_precision,
    load_model,
    quiet_bars,
    resolve_device,
)
from trustbatch.models.lora import Adapters
from trustbatch.models.packing.attention import no_mask
from trustbatch.models.packing.layout import PackedLayout
from trustbatch.models.packing.probe import enable_packing, has_plain_head
from trustbatch.models.products import speed_up_linear_layers
from trustbatch.models.quantization.layer import quantization_of, quantized_layers
from trustbatch.models.rounding import has_rounded_weights, round_weights
from trustbatch.models.tokenization import (
    count_prompt_tokens,
    decode_all,
    encode_prompt,
    refuse_other_vocabulary,
    stop_token_ids_of,
)
from trustbatch.types import Prompt
from trustbatch.utils.distributed import full_tensor
from trustbatch.utils.files import apply_umask

ADAPTER_FOLDER = "adapter"
"""subfolder of a saved model: beside the weights, loaders would mistake the model for an adapter"""


class PolicyRoot(nn.Module):
    """The model as a module whose forward pass is an arbitrary function of it.

    FSDP gathers parameters around the forward pass of the module that it wraps, and log-probs need
    more than the model's own forward pass: the weight of the head instead of its logits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that uses the model and returns a tensor or a tuple of tensors."""
        return function(*arguments)


class Policy:
    """A decoder-only Hugging Face model; parameters are float32, products in `precision`.

    With adapters (`add_adapters`) the model's own parameters are frozen, and may be rounded.
    Dropout is always off, so that trainer and engine compute the same log-probs.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, name: str, precision: str
    ) -> None:
        self.model = model.eval()
        speed_up_linear_layers(model)
        self.root = PolicyRoot(model)
        self.device: torch.device = next(model.parameters()).device
        """where it is computed, also if its parameters are offloaded"""
        self.tokenizer = tokenizer
        self.name = name
        self.precision = precision
        self.stop_token_ids = stop_token_ids_of(model, tokenizer, name)
        _refuse_state_space(model, name)
        if getattr(model, "generation_config", None) is not None:
            # many published checkpoints have sampling settings without it, and could not be saved
            model.generation_config.do_sample = True
        # padding is neither attended to nor trained on, so any token works
        pad = tokenizer.pad_token_id
        self.pad_token_id = pad if isinstance(pad, int) else self.stop_token_ids[0]
        with self.autocast() if has_rounded_weights(model) else nullcontext():
            self.packs = enable_packing(model)
            """whether the model computes packed sequences; if not, rows are padded"""
            self._has_plain_head = has_plain_head(model)
        self.quantization = quantization_of(model)
        """the format of its frozen linear layers; None if they are ordinary ones"""
        self.adapters: Adapters | None = None
        self._skips_adapters = False

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str = "auto",
        precision: str = "auto",
        lora: LoraConfig | None = None,
        quantization: str | None = None,
        trust_remote_code: bool = False,
    ) -> "Policy":
        """Load a checkpoint from a local folder or a GGUF file, or from the hub by name.

        With `lora` the parameters are in the precision of a model that will be frozen, and with
        `quantization` its linear layers in that format.
        """
        device = resolve_device(device)
        if precision == "auto":
            precision = default_precision(device)
        model, tokenizer = load_model(
            name,
            device=device,
            weights="float32" if lora is None else lora.frozen_precision(precision),
            quantization=quantization,
            trust_remote_code=trust_remote_code,
        )
        return cls(model, tokenizer, name=name, precision=precision)

    def add_adapters(self, config: LoraConfig, *, seed: int) -> None:
        """Freeze the model and add trainable low-rank adapters to its linear layers."""
        frozen = config.frozen_precision(self.precision)
        self.freeze()
        if frozen == "bfloat16":
            round_weights(self.model)
        self.adapters = Adapters(self.model, config, model_name=self.name, seed=seed)

    def without_adapters(self) -> "Policy":
        """Return the frozen base model without adapters; it shares the parameters."""
        base = copy.copy(self)
        base._skips_adapters = True
        return base

    @property
    def context_length(self) -> int:
        """The longest sequence that the model supports."""
        return context_length_of(self.model.config)

    @property
    def product_dtype(self) -> torch.dtype | None:
        """The dtype of the operands of matrix products; None: that of the parameters."""
        return None if self.precision == "float32" else getattr(torch, self.precision)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context in which matrix products run in the policy's precision."""
        if self.product_dtype is None:
            return nullcontext()
        # each weight is used once per pass: a cache would only keep rounded copies alive
        return torch.autocast(self.device.type, dtype=self.product_dtype, cache_enabled=False)

    @contextmanager
    def _forward_pass(self) -> Iterator[None]:
        off = self.adapters.switched_off() if self.adapters and self._skips_adapters else None
        with self.autocast(), off or nullcontext():
            yield

    def logits(self, input_ids: Tensor, *, num_last: int) -> Tensor:
        """Return logits [B, num_last, V] of the last positions of rows padded on the right."""
        with self._forward_pass():
            return self.model(**_inputs(input_ids, None), logits_to_keep=num_last).logits

    @property
    def copies_prompts(self) -> bool:
        """Whether attention to a shared prompt is to copies of it, which GPU kernels need."""
        return self.device.type != "cpu"

    @property
    def head(self) -> nn.Linear | None:
        """The layer from hidden states to logits; None where the model also scales or caps them."""
        return self.model.get_output_embeddings() if self._has_plain_head else None

    def hidden_states(self, input_ids: Tensor, packed: PackedLayout | None, at: Tensor) -> Tensor:
        """Return the input [T, h] of the output head at the positions `at` [T] of the flat input.

        The input is packed [N], or padded rows [B, L] without a layout.
        """
        with self._forward_pass():
            output = self.model.get_decoder()(**_inputs(input_ids, packed))
        return output.last_hidden_state.flatten(0, 1).index_select(0, at)

    def logits_at(self, input_ids: Tensor, packed: PackedLayout | None, at: Tensor) -> Tensor:
        """Return the model's own logits [T, V] at the positions `at` [T] of the flat input."""
        with self._forward_pass():
            if packed is not None:
                return self.model(**_inputs(input_ids, packed), logits_to_keep=at).logits[0]
            logits = self.model(**_inputs(input_ids, packed)).logits
        return logits.flatten(0, 1).index_select(0, at)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters by name, as an engine loads them.

        Adapters are merged into them, or are published alone.
        """
        if self.adapters is not None:
            yield from self.adapters.published_weights()
            return
        for name, parameter in self.model.named_parameters():
            yield name, full_tensor(parameter.detach())
        for name, layer in quantized_layers(self.model).items():
            yield f"{name}.weight", layer.weight

    def replica(self, device: torch.device, *, precision: str = "auto") -> "Policy":
        """Return a frozen copy for an engine, with layers in the precision of its products.

        Embeddings, last norm and head stay float32, as in the policy itself. FP8 is made from
        bfloat16.
        """
        copied = copy.deepcopy(self).freeze()
        precision = self.precision if precision == "auto" else precision
        for layer in decoder_layers(copied.model):
            for module in layer.modules():
                if isinstance(module, nn.Linear) and precision != "float32":
                    module.to(torch.bfloat16)
        copied.model.to(device)
        copied.device = device
        return copied

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that the optimizer updates, by name; they may be sharded."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def freeze(self) -> "Policy":
        """Make all parameters untrainable."""
        self.model.requires_grad_(False)
        return self

    def save(
        self,
        folder: str | Path,
        *,
        weights: dict[str, Tensor] | None = None,
        adapters: dict[str, Tensor] | None = None,
        max_file_bytes: int = 5_000_000_000,
    ) -> None:
        """Write model and tokenizer as an ordinary Hugging Face folder.

        Adapters are merged into the weights, and also saved separately. `weights` (merged) and
        `adapters` replace the current ones, by the same names (tied ones once): for a model that is
        sharded over ranks, or that is trained meanwhile.
        """
        folder = Path(folder)
        with quiet_bars():
            if self.adapters is not None:
                weights = weights or dict(self.adapters.merged_state())
                self.adapters.save(folder / ADAPTER_FOLDER, adapters)
            elif self.quantization is not None:
                weights = weights or self.model.state_dict() | dict(self.named_weights())
            self.model.save_pretrained(folder, state_dict=weights, max_shard_size=max_file_bytes)
            if self.adapters is not None:
                # the file names the dtype of the frozen weights, and loaders would round to it
                self.model.config.dtype = torch.float32
                self.model.config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        apply_umask(folder)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokenize a prompt, through the chat template where the tokenizer has one."""
        return encode_prompt(self.tokenizer, prompt)

    def count_tokens(self, prompts: Sequence[Prompt]) -> list[int | str]:
        """Return the number of tokens of each prompt, or why it can't be tokenized."""
        return count_prompt_tokens(self.tokenizer, prompts)

    def decode(self, token_ids: Sequence[Tensor | Sequence[int]]) -> list[str]:
        """Turn completions into text, without special tokens."""
        return decode_all(self.tokenizer, token_ids)


def _inputs(input_ids: Tensor, packed: PackedLayout | None) -> dict[str, Any]:
    """Return the arguments of a forward pass.

    Padding is on the right, so rows need no attention mask: under causal attention a token never
    sees what comes after it.
    """
    if packed is None:
        return {"input_ids": input_ids, "use_cache": False}
    return {
        "input_ids": input_ids[None],
        "position_ids": packed.position_ids[None],
        "attention_mask": no_mask(input_ids.device),
        "use_cache": False,
        "packed": packed,
    }


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the decoder layers of a model, as its `_no_split_modules` declares them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        # also by the names of base classes: FSDP subclasses the class of a layer
        if names.intersection(kind.__name__ for kind in type(module).__mro__):
            yield module


def _refuse_state_space(model: Any, name: str) -> None:
    layers = DynamicCache(config=model.config).layers
    if not all(hasattr(layer, "batch_select_indices") for layer in layers):
        raise ConfigError(
            f"{name!r} ({model.config.model_type}) keeps a recurrent state, which the native "
            "engine can't batch: choose a model with attention layers only."
        )


def same_tokenizer(second: Policy, trained: Policy, *, top_logprobs: int) -> None:
    """Give a second policy the tokenizer of the trained one; refuse another vocabulary.

    Models of one family often have embeddings for more ids than tokens, in different numbers. Ids
    that the trained model lacks are removed from the second model.
    """
    refuse_other_vocabulary(second.tokenizer, trained.tokenizer, name=second.name)
    num_needed = 1 + max(trained.tokenizer.get_vocab().values())
    num_own, num_trained = _num_embeddings(second), _num_embeddings(trained)
    if num_own < num_needed:
        raise ConfigError(
            f"The second policy {second.name!r} has embeddings for {num_own} ids, but its "
            f"tokenizer has {num_needed}: choose a checkpoint that fits its tokenizer."
        )
    if num_own < min(top_logprobs, num_trained):
        raise ConfigError(
            f"rollout.top_logprobs = {top_logprobs} is more than the {num_own} ids of the second "
            f"policy {second.name!r}: lower it to {num_own}."
        )
    if num_own > num_trained:
        second.model.resize_token_embeddings(num_trained)
    second.tokenizer = trained.tokenizer  # so that both decode alike


def _num_embeddings(policy: Policy) -> int:
    return int(policy.model.get_output_embeddings().weight.shape[0])
