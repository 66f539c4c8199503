"""Loading a model and its tokenizer: from a Hugging Face folder, the hub or a GGUF file.

A model can also be built without weights, to count its parameters and to plan a run. The shapes of
models that the studies use are known here, so that planning works without the hub.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from trustbatch.errors import ConfigError, first_line
from trustbatch.models.gguf import find_gguf, load_gguf, read_gguf_config
from trustbatch.models.quantization.layer import quantization_of, quantize_linears
from trustbatch.models.quantization.published import load_published, published_format
from trustbatch.models.rounding import has_rounded_weights, round_weights
from trustbatch.utils.hub import hub_is_reachable

_AUTO_MODEL: Any = AutoModelForCausalLM  # its published types do not fit its own arguments

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_QWEN3_4B = _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
_QWEN3_06B = _QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN3_17B = _QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
_QWEN3_14B = _QWEN3 | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "tie_word_embeddings": False,
}
_QWEN3_8B = _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
_QWEN25: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_QWEN25_05B = _QWEN25 | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
_QWEN25_15B = _QWEN25 | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
KNOWN_MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen/Qwen3-4B-Thinking-2507": (Qwen3Config, _QWEN3_4B),
    "Qwen/Qwen3-0.6B": (Qwen3Config, _QWEN3_06B),
    "Qwen/Qwen3-1.7B": (Qwen3Config, _QWEN3_17B),
    "Qwen/Qwen3-4B": (Qwen3Config, _QWEN3_4B),
    "Qwen/Qwen3-14B": (Qwen3Config, _QWEN3_14B),
    "Qwen/Qwen3-8B": (Qwen3Config, _QWEN3_8B),
    "Qwen/Qwen3-8B-Base": (Qwen3Config, _QWEN3_8B),
    "Qwen/Qwen2.5-1.5B": (Qwen2Config, _QWEN25_15B),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": (Qwen2Config, _QWEN25_05B),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": (Qwen2Config, _QWEN25_15B),
}


def load_model(
    name: str,
    *,
    device: str = "auto",
    weights: str = "float32",
    quantization: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a decoder-only model to a device, and its tokenizer.

    Its parameters are float32, or with `weights` = "bfloat16" what `round_weights` makes of them.
    With `quantization` its linear layers are quantized on the device, one at a time.
    """
    device = resolve_device(device)
    file = find_gguf(name)
    if file is not None:
        with quiet_bars():  # it has a progress line of its own
            model, tokenizer = load_gguf(file)
    else:
        # rounded ones are read as they are stored: no float32 copy of them is needed on the way
        as_stored = weights == "bfloat16" or quantization is not None
        model, tokenizer = _load_folder(
            name,
            dtype="auto" if as_stored else torch.float32,
            device=torch.device(device),
            quantization=quantization,
            trust_remote_code=trust_remote_code,
        )
    if quantization is not None and quantization_of(model) is None:  # else as it was published
        quantize_linears(model, quantization, torch.device(device))
    if weights == "bfloat16":
        round_weights(model)
    else:
        model.float()
    try:
        model = model.to(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _unusable(device, error) from error
    _refuse_bidirectional(model, name)
    return model, tokenizer


def resolve_device(device: str) -> str:
    """Return the device that a value of `model.device` names; "auto" prefers a GPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"model.device = {device!r}, but torch sees no GPU: set it to cpu.")
    try:
        torch.device(device)
    except RuntimeError as error:
        raise _unusable(device, error) from error
    return device


def _unusable(device: str, error: RuntimeError) -> ConfigError:
    return ConfigError(
        f"model.device = {device!r} can't be used ({first_line(error)}): set it to cpu or cuda."
    )


def context_length_of(config: Any) -> int:
    """Return the longest sequence that the model of a Hugging Face config supports."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31)


def default_precision(device: str) -> str:
    """Return the precision of matrix products that "auto" stands for on a device."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def count_parameters(name: str, *, trust_remote_code: bool = False) -> tuple[int, Any]:
    """Return the number of parameters and the model's config without loading its weights."""
    model = empty_model(name, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()), model.config


def empty_model(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return a model on the meta device: its parameters have shapes only.

    The hub is not used for `KNOWN_MODELS`.
    """
    file = find_gguf(name)
    if file is None:
        _refuse_wrong_folder(name)
    try:
        if file is not None:
            config = read_gguf_config(file)
        elif (config := _known_config(name)) is None:
            config = AutoConfig.from_pretrained(
                name, trust_remote_code=trust_remote_code, local_files_only=is_offline(name)
            )
        return without_weights(config, trust_remote_code=trust_remote_code)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.name = {name!r} could not be found: give a local folder with a Hugging Face "
            f"checkpoint, or a model name on the hub ({first_line(error)})."
        ) from error


def without_weights(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build the model of a Hugging Face config with float32 parameters on the meta device."""
    with torch.device("meta"):
        return _AUTO_MODEL.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def _known_config(name: str) -> PreTrainedConfig | None:
    """Return the config of a known model on the hub, as far as memory depends on it."""
    if name not in KNOWN_MODELS or Path(name).is_dir():
        return None
    kind, shape = KNOWN_MODELS[name]
    return kind(**shape)


def _load_folder(
    name: str,
    *,
    dtype: torch.dtype | str,
    device: torch.device,
    quantization: str | None,
    trust_remote_code: bool,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a folder or a model of the hub; where it was published quantized, those layers too."""
    _refuse_wrong_folder(name)
    offline = is_offline(name)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": offline}
    try:
        # before the model's own search for adapters, which asks the hub
        config = AutoConfig.from_pretrained(name, **common)
        published = published_format(config, name)
        _refuse_other_format(name, published, quantization)
        with quiet_bars(only_if=_is_small(Path(name))):
            if published is None:
                model = _AUTO_MODEL.from_pretrained(
                    name, dtype=dtype, use_safetensors=True, **common
                )
            else:
                model = load_published(
                    name, config, device, trust_remote_code=trust_remote_code, offline=offline
                )
            tokenizer = AutoTokenizer.from_pretrained(name, **common)
    except ConfigError as error:
        raise error
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"model.name = {name!r} could not be loaded: give a local folder with a Hugging "
            f"Face checkpoint in safetensors, or a model name on the hub ({first_line(error)})."
        ) from error
    return model, tokenizer


def _refuse_other_format(name: str, published: str | None, wanted: str | None) -> None:
    if published is not None and wanted not in (None, published):
        raise ConfigError(
            f'model.quantization = "{wanted}", and {name!r} was published in {published}: remove '
            "the key, or choose the original model."
        )


@contextmanager
def quiet_bars(*, only_if: bool = True) -> Iterator[None]:
    """Hide the progress bars of transformers, where loading is fast or has a line of its own."""
    if not only_if or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def is_offline(name: str) -> bool:
    """Whether a model that is not a local folder can only come from the hub's cache.

    Without a network, the hub's client would try again and again for minutes.
    """
    return not Path(name).is_dir() and not hub_is_reachable()


def _is_small(folder: Path) -> bool:
    """Whether this is a local checkpoint that loads in about a second."""
    return folder.is_dir() and sum(f.stat().st_size for f in folder.glob("*.safetensors")) < 2**30


def _advice(folder: Path) -> str:
    """Return what to do about a model that is missing: those of the quickstart can be made."""
    name, _, seed = folder.name.rpartition("-")
    if name != "tiny-model" or not seed.isdecimal():
        return "check the path"
    words = ["trustbatch quickstart --model-only"]
    if str(folder.parent) != "runs/quickstart":
        words.append(f"--folder {folder.parent}")
    if seed != "0":
        words.append(f"--seed {seed}")
    return f"`{' '.join(words)}` makes it in a minute"


def _refuse_wrong_folder(name: str) -> None:
    folder = Path(name)
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1  # a hub name has one
    if is_path and not folder.is_dir():
        raise ConfigError(f"model.name = {name!r} is not a folder here: {_advice(folder)}.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.name = {name!r} is a folder without config.json: give the folder of a Hugging "
            "Face checkpoint."
        )


@torch.no_grad()
def _refuse_bidirectional(model: Any, name: str) -> None:
    """Refuse a model in which a later token changes an earlier prediction."""
    device = next(model.parameters()).device
    rows = torch.tensor([[2, 3, 4], [2, 3, 5]], device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=has_rounded_weights(model)):
        first, second = model.eval()(input_ids=rows, use_cache=False).logits[:, :2].float()
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise ConfigError(
            f"{name!r} ({model.config.model_type}) attends to later tokens, so it can't be "
            "sampled from: choose a decoder-only model."
        )
