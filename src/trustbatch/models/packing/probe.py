"""Can a model compute packed tokens, and are its logits the plain product of its output head?

Both are tested on a few tokens, since the name of a model does not tell what its code does with its
arguments.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from trustbatch.models.packing.attention import NAME, REPLACES, no_mask, packed_attention
from trustbatch.models.packing.layout import PackedLayout, Segment

_PROBE = "trustbatch_probe"
_UNDERSTOOD = {
    "packed",
    "scaling",
    "sliding_window",
    "dropout",  # a policy is always in evaluation mode
    "is_causal",
    "position_ids",
    "position_embeddings",  # already applied
    "output_router_logits",
}
"""arguments that an attention layer may pass to its implementation"""
_PROMPT, _RESPONSES, _OTHERS = [2, 3, 4], [[5, 6], [7]], [[6, 3], [4, 4, 2, 5]]
_LARGE_LOGIT = 100.0


def enable_packing(model: Any) -> bool:
    """Give a model packed attention, unless that changes its results."""
    if model.config._attn_implementation == NAME:  # the model is shared with another policy
        model.set_attn_implementation(REPLACES)
    if model.config._attn_implementation != REPLACES or not model._can_set_attn_implementation():
        return False
    alone = _logits_alone(model)
    if _agrees(_logits_packed(model), alone):
        model.set_attn_implementation(NAME)
        return True
    model.set_attn_implementation(REPLACES)
    return False


@torch.no_grad()
def has_plain_head(model: Any) -> bool:
    """Whether logits are the output head's product, neither capped nor scaled."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    ids = torch.tensor([_PROMPT], device=head.weight.device)
    output = model.get_decoder()(input_ids=ids, use_cache=False)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None or hidden.shape[-1] != head.in_features:
        return False
    # a cap is visible on large logits only
    factor = _LARGE_LOGIT / float(head(hidden).abs().max().clamp(min=1e-6))
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:]))
    try:
        return _agrees(head(hidden), model(input_ids=ids, use_cache=False).logits)
    finally:
        hook.remove()


def _agrees(found: Tensor | None, expected: Tensor) -> bool:
    if found is None or found.shape != expected.shape:
        return False
    tolerance = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
    return torch.allclose(found, expected, rtol=0, atol=tolerance)  # False for NaN


@torch.no_grad()
def _logits_alone(model: Any) -> Tensor:
    """Return the logits of all sequences, each computed separately."""
    sequences = [*([*_PROMPT, *response] for response in _RESPONSES), *_OTHERS]
    device = next(model.parameters()).device
    first, *rest = (
        model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
        for ids in sequences
    )
    # the shared prompt counts once
    return torch.cat([first, rest[0][len(_PROMPT) :], *rest[1:]])


@torch.no_grad()
def _logits_packed(model: Any) -> Tensor | None:
    """Return the same from one packed pass, or None where the model does not support it."""
    windows: list[int | None] = []
    unknown: set[str] = set()

    def watched(module: Any, *tensors: Any, **options: Any) -> Any:
        unknown.update(k for k, v in options.items() if v is not None and v is not False)
        windows.append(options.get("sliding_window"))
        if options.get("is_causal") is False or not getattr(module, "is_causal", True):
            unknown.add("bidirectional attention")
        return packed_attention(module, *tensors, **options)

    AttentionInterface.register(_PROBE, watched)
    AttentionMaskInterface.register(_PROBE, sdpa_mask)
    device = next(model.parameters()).device
    shared = Segment(len(_PROMPT), tuple(map(len, _RESPONSES)))
    segments = [shared, *(Segment(len(other)) for other in _OTHERS)]
    layout: PackedLayout = PackedLayout.of(segments, copies_prompts=device.type != "cpu")
    layout = layout.to(device)
    ids = [*_PROMPT, *(i for part in (*_RESPONSES, *_OTHERS) for i in part)]
    try:
        model.set_attn_implementation(_PROBE)
        logits = model(
            input_ids=torch.tensor([ids], device=device),
            attention_mask=no_mask(device),
            position_ids=layout.position_ids[None],
            use_cache=False,
            packed=layout,
        ).logits[0]
    except (TypeError, ValueError, RuntimeError):
        return None  # its own code does not pass the layout on
    expected = _windows(model.config.get_text_config())
    if unknown - _UNDERSTOOD or expected is None or windows != expected:
        return None
    return logits


def _windows(config: Any) -> list[int | None] | None:
    """Return the attention window per layer; None where a layer has another kind of attention."""
    num_layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * num_layers
    if set(kinds) - {"full_attention", "sliding_attention"}:
        return None
    return [window if kind == "sliding_attention" else None for kind in kinds]
