"""The native engine: continuous batching on the trainer's own parameters, in this process."""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trustbatch.errors import ConfigError, EngineError
from trustbatch.models.policy import Policy
from trustbatch.models.quantization.layer import quantized_layers
from trustbatch.rollout.engine import NewerWeights
from trustbatch.rollout.native.architecture import read_architecture
from trustbatch.rollout.native.batch import Row, RunningBatch
from trustbatch.rollout.native.cache import CacheFullError
from trustbatch.rollout.native.decoder import Decoder, LlamaDecoder
from trustbatch.rollout.native.info import INFO
from trustbatch.rollout.native.outputs import Outputs
from trustbatch.rollout.native.portable_decoder import PortableDecoder
from trustbatch.rollout.sampling import SampledTokens, sample_key
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Provenance,
    SamplingParams,
)
from trustbatch.utils.chunks import chunks_of

KEPT = 0.75
"""fraction of the rows that go on at once where memory is full"""
REFILL_BELOW = 0.75
"""finished rows are replaced once less than this fraction of the batch is still running"""


_Segment = tuple[int, dict[int, SampledTokens]]
"""a version, and the tokens that it sampled by slot"""


class NativeEngine:
    """Samples from the trainer's own parameters, in the policy's precision or in FP8.

    Keys and values can be FP8 too, whatever the precision of matrix products is.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        seed: int,
        version: int = 0,
        max_sequences: int = 512,
        precision: str = "auto",
        kv_precision: str = "auto",
    ) -> None:
        self.policy = policy
        self.seed = seed
        self.max_sequences = max_sequences
        self.precision = policy.precision if precision == "auto" else precision
        self.kv_precision = kv_precision
        self.newer_weights: NewerWeights | None = None
        """weights to apply in the middle of `generate` (in-flight updates)"""
        self._version = version
        self._batch = RunningBatch(
            self._build_decoder(), max_rows=max_sequences, device=policy.device
        )

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are sampled from."""
        return self._version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load parameters; those that are the trainer's own already are not copied."""
        adapters = self.policy.adapters
        if adapters is None or adapters.published_alone:  # else it has the trainer's own adapters
            model = self.policy.model
            own = {name: parameter.detach() for name, parameter in model.named_parameters()}
            quantized = {f"{name}.weight" for name in quantized_layers(model)}  # frozen
            for name, tensor in weights:
                if name not in quantized and own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self._version = version

    def sleep(self) -> None:
        """Free the KV cache and the CUDA graphs."""
        self._batch.clear()

    def wake(self) -> None:
        """Do nothing: the cache grows as needed."""

    def close(self) -> None:
        """Free the cache; converted weights are freed with the engine."""
        self.sleep()

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all completions; at most `max_sequences` are decoded at a time.

        Newer weights that become available meanwhile sample the rest: see `_sample_all`.
        """
        groups: dict[SamplingParams, list[list[Row]]] = {}
        num_slots = 0
        for request in requests:
            self._refuse_too_long(request)
            rows = [
                Row(num_slots + offset, request, sample)
                for offset, sample in enumerate(request.samples)
            ]
            num_slots += len(rows)
            same_sampling = groups.setdefault(request.sampling.of_any_length, [])
            same_sampling += chunks_of(rows, self.max_sequences)
        self._batch.decoder.refresh()
        completions: dict[int, Completion] = {}
        for sampling, waiting in groups.items():
            try:
                segments = self._sample_all(deque(waiting), sampling)
            except BaseException:
                self._batch.clear()  # rows of a failed call must not continue in the next
                raise
            rows = [row for group in waiting for row in group]
            completions |= self._completions(rows, sampling, segments)
        return [completions[slot] for slot in range(num_slots)]

    def _sample_all(self, waiting: deque[list[Row]], sampling: SamplingParams) -> list[_Segment]:
        """Return each version with the tokens that it sampled, by slot.

        There is one version, unless newer weights become available: these continue the unfinished
        rows. They recompute the keys and values of all earlier tokens, so that a token's log-prob
        is exactly what its version assigns to it after its whole prefix.
        """
        segments: list[_Segment] = []
        while waiting:
            version = self._version
            segments.append((version, self._sample(waiting, sampling)))
            if waiting:
                self._apply_newer_weights()
        return segments

    def _apply_newer_weights(self) -> None:
        """Load the newest weights; no row is running."""
        newer_weights, self.newer_weights = self.newer_weights, None
        assert newer_weights is not None
        try:
            newer_weights.apply()  # may generate to check them, without further updates
        finally:
            self.newer_weights = newer_weights
        self._batch.decoder.refresh()

    def _sample(
        self, waiting: deque[list[Row]], sampling: SamplingParams
    ) -> dict[int, SampledTokens]:
        """Decode until every row has a stop token or max_tokens; return the tokens by slot.

        If newer weights become available it returns early, with unfinished rows in `waiting`.
        """
        batch = self._batch
        outputs = Outputs([row for group in waiting for row in group])
        is_full = False
        while waiting or batch.rows:
            may_join = batch.decoder.joins_running and not is_full
            if waiting and (may_join or not batch.rows):
                is_full = self._admit(waiting, sampling, outputs)
            num_left = outputs.num_left(batch.rows)
            if num_left:
                try:
                    tokens = batch.advance(num_left, sampling, meanwhile=outputs.settle)
                    outputs.add(batch.rows, tokens)
                except CacheFullError as error:
                    self._evict(waiting, outputs, error)
                    is_full = True
            running = outputs.running(batch.rows)
            if len(running) < REFILL_BELOW * len(batch.rows) or not running:
                batch.keep(running)
                is_full = False
            if self.newer_weights is not None and self.newer_weights.has_newer(self._version):
                self._interrupt(waiting, outputs)
                break
        return outputs.by_slot()

    def _interrupt(self, waiting: deque[list[Row]], outputs: Outputs) -> None:
        """Put running rows in front of `waiting`, each with the tokens it has sampled so far."""
        waiting.extendleft([row] for row in reversed(outputs.leave(self._batch.rows)))
        self._batch.keep([])

    def _admit(self, waiting: deque[list[Row]], sampling: SamplingParams, outputs: Outputs) -> bool:
        """Add groups while there is room, a few prompts at a time; True if memory is full."""
        max_groups, is_fresh = len(waiting), False
        while waiting and len(waiting[0]) <= self.max_sequences - len(self._batch.rows):
            groups = self._next_groups(waiting, max_groups)
            keys = [self._key(row) for group in groups for row in group]
            try:
                tokens = self._batch.add(groups, keys, sampling)
            except CacheFullError as error:
                if not self._batch.rows and len(groups) == len(groups[0]) == 1:
                    if is_fresh:
                        raise _no_memory() from error
                    # pages that no row holds may be in the way of a long context; the second call
                    # finds none held, so that the next pool grows as it is needed
                    self._batch.clear()
                    self._batch.clear()
                    is_fresh = True
                waiting.extendleft(reversed(_halved(groups)))
                if self._batch.rows:
                    return True  # running rows will free memory
                max_groups = max(len(groups) // 2, 1)
                continue
            outputs.add([row for group in groups for row in group], tokens)
            if not self._batch.decoder.joins_running:
                break
        return False

    def _next_groups(self, waiting: deque[list[Row]], max_groups: int) -> list[list[Row]]:
        """Take at least one group, and more as far as they fit the batch and one forward pass."""
        groups = [waiting.popleft()]
        num_free = self.max_sequences - len(self._batch.rows) - len(groups[0])
        longest = len(groups[0][0].context)
        while waiting and len(waiting[0]) <= num_free and len(groups) < max_groups:
            longest = max(longest, len(waiting[0][0].context))
            if longest * (len(groups) + 1) > self._batch.decoder.prefill_tokens:
                break
            groups.append(waiting.popleft())
            num_free -= len(groups[-1])
        return groups

    def _evict(self, waiting: deque[list[Row]], outputs: Outputs, error: CacheFullError) -> None:
        """Free memory: the last rows go on later, from the tokens that they have sampled."""
        rows = self._batch.rows
        if len(rows) <= 1:
            raise _no_memory() from error
        num_kept = min(int(KEPT * len(rows)), len(rows) - 1)
        waiting.extendleft([row] for row in reversed(outputs.leave(rows[num_kept:])))
        self._batch.keep(list(range(num_kept)))

    def _build_decoder(self) -> Decoder:
        policy = self.policy
        architecture = read_architecture(policy.model)
        if architecture is not None:
            return LlamaDecoder(
                architecture,
                precision=self.precision,
                kv_precision=self.kv_precision,
                max_rows=self.max_sequences,
            )
        if self.precision != policy.precision:
            raise ConfigError(
                f'rollout.precision = "{self.precision}" is not available for '
                f"{policy.model.config.model_type} models in the native engine: remove it, or "
                'set rollout.engine = "vllm".'
            )
        if self.kv_precision != "auto":
            raise ConfigError(
                f'rollout.kv_precision = "{self.kv_precision}" is not available for '
                f"{policy.model.config.model_type} models in the native engine: remove it."
            )
        return PortableDecoder(
            policy.model,
            pad_token_id=policy.pad_token_id,
            context_length=policy.context_length,
            autocast=policy.autocast(),
        )

    def _key(self, row: Row) -> int:
        request = row.request
        return sample_key(self.seed, self._version, request.prompt_id, row.sample, request.turn)

    def _refuse_too_long(self, request: GenerationRequest) -> None:
        length = len(request.token_ids) + request.sampling.max_tokens
        if not request.token_ids or length > self.policy.context_length:
            raise ConfigError(
                f"Prompt {request.prompt_id!r} has {len(request.token_ids)} tokens, which with "
                f"max_tokens = {request.sampling.max_tokens} does not fit the model's context of "
                f"{self.policy.context_length}: lower max_tokens or leave out such prompts."
            )

    def _completions(
        self,
        rows: Sequence[Row],
        sampling: SamplingParams,
        segments: Sequence[_Segment],
    ) -> dict[int, Completion]:
        parts = [
            [(version, tokens[row.slot]) for version, tokens in segments if row.slot in tokens]
            for row in rows
        ]
        results = [SampledTokens.concatenate([tokens for _, tokens in of_row]) for of_row in parts]
        provenances = {version: self._provenance(version, sampling) for version, _ in segments}
        texts = self.policy.decode([result.token_ids for result in results])
        stops = set(sampling.stop_token_ids)
        return {
            row.slot: Completion(
                prompt_id=row.request.prompt_id,
                sample=row.sample,
                token_ids=result.token_ids,
                behavior_logp=result.logp,
                top_token_ids=result.top_token_ids,
                behavior_top_logp=result.top_logp,
                anchor_logp=result.anchor_logp,
                anchor_top_logp=result.anchor_top_logp,
                finish_reason=(
                    FinishReason.STOP if int(result.token_ids[-1]) in stops else FinishReason.LENGTH
                ),
                provenance=provenances[of_row[0][0]],
                text=text,
                versions=_versions(of_row),
            )
            for row, of_row, result, text in zip(rows, parts, results, texts, strict=True)
        }

    def _provenance(self, version: int, sampling: SamplingParams) -> Provenance:
        return Provenance(
            policy=self.policy.name,
            version=version,
            engine=INFO.name,
            precision=self.precision,
            kv_precision=self.kv_precision,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprob_mode=sampling.logprob_mode,
        )


def _versions(parts: Sequence[tuple[int, SampledTokens]]) -> Tensor | None:
    """Return the version of each token [n] if there are several, else None."""
    if len(parts) == 1:
        return None
    versions = torch.tensor([version for version, _ in parts], dtype=torch.int32)
    return versions.repeat_interleave(torch.tensor([len(tokens.token_ids) for _, tokens in parts]))


def _halved(groups: list[list[Row]]) -> list[list[Row]]:
    """Return the groups; a single one is halved, so that its parts may fit one by one."""
    if len(groups) > 1 or len(groups[0]) == 1:
        return groups
    middle = len(groups[0]) // 2
    return [groups[0][:middle], groups[0][middle:]]


def _no_memory() -> EngineError:
    return EngineError(
        "The GPU has no memory left for the keys and values of a single sequence: lower "
        "rollout.max_tokens, or follow the advice of --dry-run."
    )
