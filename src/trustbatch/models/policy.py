"""The policy: a causal language model with its tokenizer, on one device."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from trustbatch.errors import ConfigError
from trustbatch.models.config import LoraConfig
from trustbatch.models.gguf import find_gguf, load_gguf, read_gguf_config
from trustbatch.models.known_shapes import known_config
from trustbatch.models.lora import Adapters
from trustbatch.models.packing.attention import no_mask
from trustbatch.models.packing.layout import PackedLayout
from trustbatch.models.packing.probe import enable_packing, has_plain_head
from trustbatch.types import Prompt
from trustbatch.utils.distributed import full_tensor

ADAPTER_FOLDER = "adapter"
"""within a saved model's; beside the weights, loaders would take the model for a mere adapter"""
_AUTO_MODEL: Any = AutoModelForCausalLM  # its published types do not fit its own arguments


class PolicyRoot(nn.Module):
    """The model as a module whose forward pass is any function of it.

    FSDP gathers parameters around the forward pass of the module that it was given, and log-probs
    need more than the model's own: the head's weight without its logits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that uses the model; what it returns is a tensor or a tuple of them."""
        return function(*arguments)


class Policy:
    """A decoder-only Hugging Face model; parameters are float32, products in `precision`.

    With adapters (`add_adapters`) the model's own parameters are frozen, and may be bfloat16.
    Dropout is off in training too: log-probs then do not depend on who computes them.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, name: str, precision: str
    ) -> None:
        self.model = model.eval()
        self.root = PolicyRoot(model)
        self.device: torch.device = next(model.parameters()).device
        """where it is computed, also if its parameters are kept elsewhere"""
        self.tokenizer = tokenizer
        self.name = name
        self.precision = precision
        self.stop_token_ids = _stop_token_ids(model, tokenizer, name)
        _refuse_state_space(model, name)
        if getattr(model, "generation_config", None) is not None:
            # many published checkpoints have sampling settings without this, and can't be saved so
            model.generation_config.do_sample = True
        # padding is neither attended to nor trained on, so any token will do
        pad = tokenizer.pad_token_id
        self.pad_token_id = pad if isinstance(pad, int) else self.stop_token_ids[0]
        self.packs = enable_packing(model)
        """whether the model computes sequences that lie end to end; if not, rows are padded"""
        self._has_plain_head = has_plain_head(model)
        self.adapters: Adapters | None = None
        self._skips_adapters = False

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str = "auto",
        precision: str = "auto",
        trust_remote_code: bool = False,
    ) -> "Policy":
        """Load a checkpoint from a local folder or a GGUF file, or from the hub by name."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"model.device = {device!r}, but torch sees no GPU: set it to cpu.")
        if precision == "auto":
            precision = default_precision(device)
        file = find_gguf(name)
        if file is not None:
            with quiet_bars():  # it has a line of its own
                model, tokenizer = load_gguf(file)
        else:
            model, tokenizer = _load_folder(name, trust_remote_code=trust_remote_code)
        try:
            model = model.to(device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"model.device = {device!r} can't be used ({_first(error)}): set it to cpu or cuda."
            ) from error
        _refuse_bidirectional(model, name)
        return cls(model, tokenizer, name=name, precision=precision)

    def add_adapters(self, config: LoraConfig, *, seed: int) -> None:
        """Freeze the model and put trainable low-rank adapters beside its linear layers."""
        if config.base_precision == "bfloat16" and self.product_dtype != torch.bfloat16:
            raise ConfigError(
                'model.lora.base_precision = "bfloat16" needs matrix products in bfloat16, and '
                f"those of this run are in {self.precision}: set model.precision to bfloat16, or "
                "remove the key."
            )
        self.freeze()
        self.adapters = Adapters(self.model, config, model_name=self.name, seed=seed)

    def without_adapters(self) -> "Policy":
        """Return the frozen model that the adapters started from, on the same parameters."""
        base = copy.copy(self)
        base._skips_adapters = True
        return base

    @property
    def context_length(self) -> int:
        """The longest sequence that the model was made for."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 2**31)

    @property
    def product_dtype(self) -> torch.dtype | None:
        """What the operands of matrix products are rounded to; None keeps them as they are."""
        return None if self.precision == "float32" else getattr(torch, self.precision)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context in which matrix products run in the policy's precision."""
        if self.product_dtype is None:
            return nullcontext()
        # a weight is used once in a pass: a cache would only keep rounded copies alive for longer
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
    def shares_prompts(self) -> bool:
        """Whether packed responses may share their prompt; the kernels of a GPU don't know how."""
        return self.packs and self.device.type == "cpu"

    @property
    def head(self) -> nn.Linear | None:
        """The layer from hidden states to logits; None where the model does more to them."""
        return self.model.get_output_embeddings() if self._has_plain_head else None

    def hidden_states(self, input_ids: Tensor, packed: PackedLayout | None, at: Tensor) -> Tensor:
        """Return the states [T, h] that the output head takes, at some of the input's places.

        The input is packed [N], or padded rows [B, L] where there is no layout.
        """
        with self._forward_pass():
            output = self.model.get_decoder()(**_inputs(input_ids, packed))
        return output.last_hidden_state.flatten(0, 1).index_select(0, at)

    def logits_at(self, input_ids: Tensor, packed: PackedLayout | None, at: Tensor) -> Tensor:
        """Return the logits [T, V] at some of the input's places, as the model makes them."""
        with self._forward_pass():
            if packed is not None:
                return self.model(**_inputs(input_ids, packed), logits_to_keep=at).logits[0]
            logits = self.model(**_inputs(input_ids, packed)).logits
        return logits.flatten(0, 1).index_select(0, at)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters by name, as an engine loads them; adapters are merged into them."""
        if self.adapters is not None:
            yield from self.adapters.merged_weights()
            return
        for name, parameter in self.model.named_parameters():
            yield name, full_tensor(parameter.detach())

    def replica(self, device: torch.device, *, precision: str = "auto") -> "Policy":
        """Return a frozen copy for an engine, layers in the precision of its products.

        What lies around the layers stays float32, as in the policy itself. FP8 is made from
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
        """Yield what the optimizer changes, by its name in the model; a rank has its part of it."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def freeze(self) -> "Policy":
        """Make this a policy that is never trained."""
        self.model.requires_grad_(False)
        return self

    def save(
        self,
        folder: Path,
        *,
        weights: dict[str, Tensor] | None = None,
        adapters: dict[str, Tensor] | None = None,
        max_file_bytes: int = 5_000_000_000,
    ) -> None:
        """Write model and tokenizer as an ordinary Hugging Face folder.

        Adapters are merged into the weights, and written once more by themselves. `weights` (merged
        ones) and `adapters` stand in for the present ones, by the same names (tied ones once): for
        a model that is spread over ranks, or that is being trained meanwhile.
        """
        with quiet_bars():
            if self.adapters is not None:
                weights = weights or self.adapters.merged_state()
                self.adapters.save(folder / ADAPTER_FOLDER, adapters)
            self.model.save_pretrained(folder, state_dict=weights, max_shard_size=max_file_bytes)
            self.tokenizer.save_pretrained(folder)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokenize a prompt, through the chat template where the tokenizer has one."""
        return encode_prompt(self.tokenizer, prompt)

    def decode(self, token_ids: list[list[int]]) -> list[str]:
        """Turn completions into text, without special tokens."""
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Tokenize a prompt, through the chat template where the tokenizer has one."""
    if tokenizer.chat_template:
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        text = tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": prompt.text}],
            add_generation_prompt=True,
            tokenize=False,
            **prompt.chat,  # a template ignores what it does not know
        )
        # the template has already written the special tokens
        return encode_text(tokenizer, str(text), prompt_id=prompt.id, add_special_tokens=False)
    text = f"{prompt.system}\n\n{prompt.text}" if prompt.system else prompt.text
    return encode_text(tokenizer, text, prompt_id=prompt.id)


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    prompt_id: str,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Tokenize a text of a prompt, or of its episode."""
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:
        if type(error) is not Exception:  # what the tokenizers library raises has no other type
            raise
        raise ConfigError(
            f"The tokenizer of {tokenizer.name_or_path} can't write prompt {prompt_id!r}: it has "
            f"no token for some character ({_first(error)}): leave the prompt out, or choose "
            "another model."
        ) from error


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


def default_precision(device: str) -> str:
    """Return what "auto" means for the products on a device."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that a model is a stack of, as its authors name them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        # by the names of base classes too: FSDP makes a class of its own from a layer's
        if names.intersection(kind.__name__ for kind in type(module).__mro__):
            yield module


def _load_folder(name: str, *, trust_remote_code: bool) -> tuple[Any, PreTrainedTokenizerBase]:
    _refuse_wrong_folder(name)
    try:
        with quiet_bars(only_if=_is_small(Path(name))):
            model = _AUTO_MODEL.from_pretrained(
                name,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"model.name = {name!r} could not be loaded: give a local folder with a Hugging "
            f"Face checkpoint in safetensors, or a model name on the hub ({_first(error)})."
        ) from error
    return model, tokenizer


@contextmanager
def quiet_bars(*, only_if: bool = True) -> Iterator[None]:
    """Keep transformers' progress bars away where there is nothing to wait for."""
    if not only_if or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def _is_small(folder: Path) -> bool:
    """Whether this is a local checkpoint that loads in about a second."""
    return folder.is_dir() and sum(f.stat().st_size for f in folder.glob("*.safetensors")) < 2**30


def count_parameters(name: str, *, trust_remote_code: bool = False) -> tuple[int, Any]:
    """Return the number of parameters and the model's config without loading any weight."""
    model = empty_model(name, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()), model.config


def empty_model(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return a model without any weight: its parameters have shapes only.

    The hub is not asked for models whose shape is known here.
    """
    file = find_gguf(name)
    if file is None:
        _refuse_wrong_folder(name)
    try:
        if file is not None:
            config = read_gguf_config(file)
        elif (config := known_config(name)) is None:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        return without_weights(config, trust_remote_code=trust_remote_code)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.name = {name!r} could not be found: give a local folder with a Hugging Face "
            f"checkpoint, or a model name on the hub ({_first(error)})."
        ) from error


def without_weights(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build the model of a Hugging Face config; its parameters are float32 and have no content."""
    with torch.device("meta"):
        return _AUTO_MODEL.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def _refuse_wrong_folder(name: str) -> None:
    folder = Path(name)
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1  # a hub name has one
    if is_path and not folder.is_dir():
        raise ConfigError(f"model.name = {name!r} is not a folder here: check the path.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.name = {name!r} is a folder without config.json: give the folder of a Hugging "
            "Face checkpoint."
        )


def _stop_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[int, ...]:
    generation_config = getattr(model, "generation_config", None)
    configured = getattr(generation_config, "eos_token_id", None)
    ids = list(configured) if isinstance(configured, list | tuple) else [configured]
    found = dict.fromkeys(int(i) for i in [tokenizer.eos_token_id, *ids] if i is not None)
    if not found:
        raise ConfigError(
            f"The tokenizer of {name!r} has no end-of-sequence token, so a completion could never "
            "stop: set eos_token in its tokenizer_config.json."
        )
    return tuple(found)


@torch.no_grad()
def _refuse_bidirectional(model: Any, name: str) -> None:
    """Look whether a later token changes what was predicted before it."""
    rows = torch.tensor([[2, 3, 4], [2, 3, 5]], device=next(model.parameters()).device)
    first, second = model.eval()(input_ids=rows, use_cache=False).logits[:, :2].float()
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise ConfigError(
            f"{name!r} ({model.config.model_type}) looks at tokens that come later, so it can't be "
            "sampled from: choose a decoder-only model."
        )


def _refuse_state_space(model: Any, name: str) -> None:
    layers = DynamicCache(config=model.config).layers
    if not all(hasattr(layer, "batch_select_indices") for layer in layers):
        raise ConfigError(
            f"{name!r} ({model.config.model_type}) keeps a recurrent state, which the native "
            "engine can't batch: choose a model with attention layers only."
        )


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
