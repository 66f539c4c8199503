"""The formats of recorded rollouts, told apart by the fields of a line.

`plain`: this package's own, one completion per line. `vllm`: what `LLM.generate` of vLLM returns.
`completions` and `chat`: responses of an OpenAI-compatible server, alone or beside their request.
`logged`: what a run of this package wrote to `rollouts/`. docs/doctor.md has an example of each.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trustbatch.doctor.rollouts import fields
from trustbatch.doctor.rollouts.fields import Json, fault
from trustbatch.doctor.rollouts.recorded import RecordedRollout, RecordedSettings

TOKEN_ID = "token_id:"
"""how vLLM writes tokens where `return_tokens_as_token_ids` is set"""


def format_of(record: Json, *, line: int) -> str:
    """Return the name of a record's format."""
    response = _response(record)
    if "choices" in response:
        choices = response["choices"]
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            raise fault(line, "has no usable 'choices': it must be a list of objects")
        return "chat" if "message" in choices[0] else "completions"
    if "outputs" in record:
        return "vllm"
    if "behavior_logp" in record or "mean_behavior_logp" in record:
        return "logged"
    if "token_ids" in record and "logprobs" in record:
        return "plain"
    raise fault(
        line,
        "has no format that is known: give each completion 'prompt_token_ids', 'token_ids' and "
        "'logprobs', or use the responses of vLLM or of an OpenAI-compatible server; found "
        f"{', '.join(map(repr, sorted(record)[:8])) or 'no field'}",
    )


def parse(record: Json, name: str, *, line: int) -> list[RecordedRollout]:
    """Return the completions of a line in a known format."""
    return list(_PARSERS[name](record, line))


def _response(record: Json) -> Json:
    """Return the response of a line: itself, or `response`, or `response.body` of a batch file."""
    response = record.get("response", record)
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    return response if isinstance(response, dict) else {}


def _plain(record: Json, line: int) -> Iterator[RecordedRollout]:
    yield RecordedRollout(
        line=line,
        token_ids=fields.token_ids(record["token_ids"], line=line, name="token_ids"),
        logprobs=fields.logprobs(record["logprobs"], line=line, name="logprobs"),
        text=fields.text(record, "text", line=line),
        **_prompt(record, line),
        **_origin(record, line),
        settings=_settings(record, line),
    )


def _vllm(record: Json, line: int) -> Iterator[RecordedRollout]:
    outputs = record["outputs"]
    if not isinstance(outputs, list):
        raise fault(line, "has no usable 'outputs': it must be a list of completions")
    for output in outputs:
        if not isinstance(output, dict):
            raise fault(line, "has an entry of 'outputs' that is not an object")
        ids = fields.token_ids(output.get("token_ids"), line=line, name="outputs.token_ids")
        yield RecordedRollout(
            line=line,
            token_ids=ids,
            logprobs=_of_positions(output.get("logprobs"), ids, line),
            text=fields.text(output, "text", line=line),
            **_prompt(record, line),
            **_origin(record, line),
            settings=_settings(record, line),
        )


def _of_positions(value: Any, ids: tuple[int, ...], line: int) -> tuple[float, ...]:
    """Return the log-probs of the sampled tokens among those of the most likely ones.

    vLLM has a dictionary of id to {"logprob", "rank", "decoded_token"} for each position.
    """
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise fault(
            line,
            "has no usable 'outputs.logprobs': sample with SamplingParams(logprobs=1) and write "
            "it as a list with a dictionary for each token",
        )
    if len(value) != len(ids):
        found = [next(iter(position.values()), None) for position in value]
    else:
        found = [position.get(str(each)) for position, each in zip(value, ids, strict=True)]
    return fields.logprobs(
        [each.get("logprob") if isinstance(each, dict) else each for each in found],
        line=line,
        name="outputs.logprobs",
    )


def _completions(record: Json, line: int) -> Iterator[RecordedRollout]:
    response = _response(record)
    for choice in response["choices"]:
        logprobs = fields.table(choice, "logprobs", line=line)
        tokens = logprobs.get("tokens")
        yield _of_choice(
            record,
            choice,
            line,
            text=fields.text(choice, "text", line=line),
            logprobs=fields.logprobs(
                logprobs.get("token_logprobs"), line=line, name="choices.logprobs.token_logprobs"
            ),
            tokens=[{"token": each} for each in tokens] if isinstance(tokens, list) else [],
        )


def _chat(record: Json, line: int) -> Iterator[RecordedRollout]:
    response = _response(record)
    for choice in response["choices"]:
        content = fields.table(choice, "logprobs", line=line).get("content")
        if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
            raise fault(
                line,
                "has no usable 'choices.logprobs.content': send the request with logprobs = true",
            )
        message = fields.table(choice, "message", line=line)
        yield _of_choice(
            record,
            choice,
            line,
            text=fields.text(message, "content", line=line),
            logprobs=fields.logprobs(
                [each.get("logprob") for each in content],
                line=line,
                name="choices.logprobs.content.logprob",
            ),
            tokens=content,
        )


def _of_choice(
    record: Json,
    choice: Json,
    line: int,
    *,
    text: str | None,
    logprobs: tuple[float, ...],
    tokens: list[dict[str, Any]],
) -> RecordedRollout:
    """Return a choice of a response; ids are vLLM's extension of the format."""
    request, response = fields.table(record, "request", line=line), _response(record)
    request = request.get("body", request)
    strings = tuple(_bytes(each, line) for each in tokens)
    ids = choice.get("token_ids")
    if ids is None and strings and all(each.startswith(TOKEN_ID.encode()) for each in strings):
        ids = [int(each.removeprefix(TOKEN_ID.encode())) for each in strings]
    elif ids is None and not strings:
        raise fault(line, "has neither 'token_ids' nor the tokens of its log-probs")
    named = {**request, **{k: v for k, v in response.items() if k == "prompt_token_ids"}}
    if choice.get("prompt_token_ids") is not None:
        named["prompt_token_ids"] = choice["prompt_token_ids"]
    return RecordedRollout(
        line=line,
        token_ids=None if ids is None else fields.token_ids(ids, line=line, name="token_ids"),
        token_strings=strings if ids is None else None,
        logprobs=logprobs,
        text=text,
        **_prompt({**record, **named}, line),
        **_origin({**record, "model": response.get("model")}, line),
        settings=_settings({**record, **request}, line),
    )


def _bytes(token: Mapping[str, Any], line: int) -> bytes:
    """Return the bytes of a token: as recorded, or of its string."""
    recorded, string = token.get("bytes"), token.get("token")
    if isinstance(recorded, list) and all(
        isinstance(each, int) and 0 <= each < 256 for each in recorded
    ):
        if isinstance(string, str) and string.startswith(TOKEN_ID):
            return string.encode()
        return bytes(recorded)
    if not isinstance(string, str):
        raise fault(line, "has a token of 'choices.logprobs' without its string")
    return string.encode("utf-8", errors="replace")


def _logged(record: Json, line: int) -> Iterator[RecordedRollout]:
    if "token_id" not in record:
        return  # the run kept the tokens of some completions only
    recorded = fields.logprobs(record["behavior_logp"], line=line, name="behavior_logp")
    sampled = tuple(not math.isnan(each) for each in recorded)
    yield RecordedRollout(
        line=line,
        token_ids=fields.token_ids(record["token_id"], line=line, name="token_id"),
        logprobs=recorded,
        sampled=None if all(sampled) else sampled,
        prompt=fields.text(record, "model_prompt", line=line),
        model=fields.text(record, "policy", line=line),
        version=str(record.get("version", "")) or None,
        precision=fields.text(record, "precision", line=line),
        settings=_settings(record, line),
    )


def _prompt(record: Json, line: int) -> dict[str, Any]:
    """Return what is known of the prompt: ids, text, messages."""
    ids = record.get("prompt_token_ids")
    messages = record.get("messages")
    prompt = record.get("prompt")
    if isinstance(prompt, list) and ids is None:  # a request may have ids in the place of text
        ids, prompt = prompt, None
    if messages is not None and not isinstance(messages, list):
        raise fault(line, "has no usable 'messages': it must be a list of objects")
    if ids is None and prompt is None and messages is None:
        raise fault(
            line,
            "has no prompt: add 'prompt_token_ids' (vLLM: return_token_ids = true), 'prompt' or "
            '\'messages\', or write each line as {"request": ..., "response": ...}',
        )
    return {
        "prompt_token_ids": None
        if ids is None
        else fields.token_ids(ids, line=line, name="prompt_token_ids"),
        "prompt": prompt if isinstance(prompt, str) else None,
        "messages": messages,
    }


def _origin(record: Json, line: int) -> dict[str, Any]:
    version = record.get("version")
    return {
        "model": fields.text(record, "model", line=line),
        "version": None if version is None else str(version),
        "precision": fields.text(record, "precision", line=line),
    }


def _settings(record: Json, line: int) -> RecordedSettings:
    """Return the sampling settings; vLLM writes "no top-k" as 0 or -1."""
    stated = {**record, **fields.table(record, "sampling_params", line=line)}
    top_k = fields.number(stated, "top_k", line=line)
    return RecordedSettings(
        temperature=fields.number(stated, "temperature", line=line),
        top_p=fields.number(stated, "top_p", line=line),
        top_k=None if top_k is None else max(int(top_k), 0),
    )


_PARSERS: dict[str, Callable[[Json, int], Iterator[RecordedRollout]]] = {
    "plain": _plain,
    "vllm": _vllm,
    "completions": _completions,
    "chat": _chat,
    "logged": _logged,
}
