"""The native engine: continuous batching on the trainer's own parameters, in this process."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trustbatch.errors import ConfigError, EngineError
from trustbatch.models.policy import Policy
from trustbatch.rollout.in_flight import Offers
from trustbatch.rollout.native.architecture import read_architecture
from trustbatch.rollout.native.batch import Row, RunningBatch
from trustbatch.rollout.native.cache import CacheFullError
from trustbatch.rollout.native.decoder import Decoder, LlamaDecoder
from trustbatch.rollout.native.portable_decoder import PortableDecoder
from trustbatch.rollout.sampling import SampledTokens, refuse_divergence, sample_key
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Provenance,
    SamplingParams,
)

REFILL_BELOW = 0.75
"""rows leave and others enter once less than this share of the batch is still running"""
PREFILL_TOKENS = 16384
"""prompt tokens, padding included, in one forward pass"""


class NativeEngine:
    """Samples from the very parameters that are trained, in the policy's precision or in FP8."""

    def __init__(
        self,
        policy: Policy,
        *,
        seed: int,
        version: int = 0,
        max_sequences: int = 512,
        precision: str = "auto",
    ) -> None:
        self.policy = policy
        self.seed = seed
        self.max_sequences = max_sequences
        self.precision = policy.precision if precision == "auto" else precision
        self.offers: Offers | None = None
        """newer weights to take over while completions are sampled"""
        self._version = version
        self._batch = RunningBatch(
            self._build_decoder(), max_rows=max_sequences, device=policy.device
        )

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are sampled from."""
        return self._version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over parameters; those that already are the trainer's own need no copy."""
        if self.policy.adapters is None:  # else the trainer's own are merged at each generation
            own = dict(self.policy.named_weights())
            for name, tensor in weights:
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self._version = version

    def sleep(self) -> None:
        """Give back the cache of keys and values, and the recorded graphs."""
        self._batch.forget()

    def wake(self) -> None:
        """Nothing to do: the cache grows by need."""

    def close(self) -> None:
        """Give the cache back; images of the weights end with the engine."""
        self.sleep()

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample all samples, as many sequences at a time as `max_sequences` allows.

        Where `offers` has newer weights meanwhile, they sample what is left: see `_sample_all`.
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
            of_sampling = groups.setdefault(request.sampling.of_any_length, [])
            for start in range(0, len(rows), self.max_sequences):
                of_sampling.append(rows[start : start + self.max_sequences])
        self._batch.decoder.refresh()
        completions: dict[int, Completion] = {}
        for sampling, waiting in groups.items():
            try:
                spells = self._sample_all(deque(waiting), sampling)
            except BaseException:
                self._batch.forget()  # rows of a broken call must not run on in the next
                raise
            rows = [row for group in waiting for row in group]
            completions |= self._completions(rows, sampling, spells)
        return [completions[slot] for slot in range(num_slots)]

    def _sample_all(
        self, waiting: deque[list[Row]], sampling: SamplingParams
    ) -> list[tuple[int, dict[int, SampledTokens]]]:
        """Return what each version sampled, by slot: one version, unless newer ones are offered.

        A newer one goes on with the rows that have not ended. It computes the keys and values of
        all their tokens itself, so that a token's log-prob is the one which its version gives it
        after all that stands before it.
        """
        spells: list[tuple[int, dict[int, SampledTokens]]] = []
        while waiting:
            version = self._version
            sampled = self._sample(waiting, sampling)
            spells.append((version, sampled))
            if waiting:
                self._take_over()
        return spells

    def _take_over(self) -> None:
        """Load the weights that are offered; no row is running."""
        offers, self.offers = self.offers, None
        assert offers is not None
        try:
            offers.apply()  # may sample to check them, and from no others meanwhile
        finally:
            self.offers = offers
        self._batch.decoder.refresh()

    def _sample(
        self, waiting: deque[list[Row]], sampling: SamplingParams
    ) -> dict[int, SampledTokens]:
        """Keep the batch full until every row has a stop token or its tokens; results by slot.

        Where newer weights are offered it ends early, and rows that have not are `waiting` again.
        """
        batch = self._batch
        ledger = _Ledger(sampling)
        is_full = False
        while waiting or batch.rows:
            may_join = batch.decoder.joins_running and not is_full
            if waiting and (may_join or not batch.rows):
                is_full = self._admit(waiting, sampling, ledger)
            num_left = ledger.num_left(batch.rows)
            if num_left:
                try:
                    ledger.add(batch.rows, batch.advance(num_left, sampling))
                except CacheFullError as error:
                    self._send_back(waiting, ledger, error)
                    is_full = True
            running = [n for n, row in enumerate(batch.rows) if not ledger.has_ended(row)]
            if len(running) < REFILL_BELOW * len(batch.rows) or not running:
                batch.keep(running)
                is_full = False
            if self.offers is not None and self.offers.has_newer(self._version):
                self._interrupt(waiting, ledger)
                break
        return ledger.by_slot()

    def _interrupt(self, waiting: deque[list[Row]], ledger: "_Ledger") -> None:
        """Put running rows before those that wait, each with what it has sampled so far."""
        running = [row for row in self._batch.rows if not ledger.has_ended(row)]
        sampled = ledger.by_slot()
        waiting.extendleft(
            [replace(row, sampled=row.sampled + tuple(sampled[row.slot].token_ids.tolist()))]
            for row in reversed(running)
        )
        self._batch.keep([])

    def _admit(
        self, waiting: deque[list[Row]], sampling: SamplingParams, ledger: "_Ledger"
    ) -> bool:
        """Let groups in while there are seats, a few prompts at a time; True if memory is full."""
        most = len(waiting)
        while waiting and len(waiting[0]) <= self.max_sequences - len(self._batch.rows):
            groups = self._next_groups(waiting, most)
            keys = [self._key(row) for group in groups for row in group]
            try:
                sampled = self._batch.add(groups, keys, sampling)
            except CacheFullError as error:
                if not self._batch.rows and len(groups) == len(groups[0]) == 1:
                    raise _no_memory() from error
                waiting.extendleft(reversed(_parted(groups)))
                if self._batch.rows:
                    return True  # those that run will make room
                most = max(len(groups) // 2, 1)
                continue
            ledger.add([row for group in groups for row in group], sampled)
            if not self._batch.decoder.joins_running:
                break
        return False

    def _next_groups(self, waiting: deque[list[Row]], most: int) -> list[list[Row]]:
        """Take groups that have seats, at least one, whose prompts make one forward pass."""
        groups = [waiting.popleft()]
        seats = self.max_sequences - len(self._batch.rows) - len(groups[0])
        longest = len(groups[0][0].context)
        while waiting and len(waiting[0]) <= seats and len(groups) < most:
            longest = max(longest, len(waiting[0][0].context))
            if longest * (len(groups) + 1) > PREFILL_TOKENS:
                break
            groups.append(waiting.popleft())
            seats -= len(groups[-1])
        return groups

    def _send_back(
        self, waiting: deque[list[Row]], ledger: "_Ledger", error: CacheFullError
    ) -> None:
        """Free memory: the later half of the rows will be sampled again, to the same tokens."""
        rows = self._batch.rows
        if len(rows) <= 1:
            raise _no_memory() from error
        kept = list(range(len(rows) // 2))
        for row in rows[len(kept) :]:
            if not ledger.has_ended(row):
                ledger.forget(row)
                waiting.append([row])
        self._batch.keep(kept)

    def _build_decoder(self) -> Decoder:
        policy = self.policy
        architecture = read_architecture(policy.model)
        if architecture is not None:
            return LlamaDecoder(
                architecture,
                precision=self.precision,
                max_rows=self.max_sequences,
            )
        if self.precision != policy.precision:
            raise ConfigError(
                f'rollout.precision = "{self.precision}" is not available for '
                f"{policy.model.config.model_type} models in the native engine: remove it, or "
                'set rollout.engine = "vllm".'
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
        spells: Sequence[tuple[int, dict[int, SampledTokens]]],
    ) -> dict[int, Completion]:
        parts = [
            [(version, sampled[row.slot]) for version, sampled in spells if row.slot in sampled]
            for row in rows
        ]
        results = [SampledTokens.joined([sampled for _, sampled in of_row]) for of_row in parts]
        provenances = {version: self._provenance(version, sampling) for version, _ in spells}
        texts = self.policy.decode([result.token_ids.tolist() for result in results])
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
            engine="native",
            precision=self.precision,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprob_mode=sampling.logprob_mode,
        )


def _versions(parts: Sequence[tuple[int, SampledTokens]]) -> Tensor | None:
    """Return the version of each token [n], where there are several."""
    if len(parts) == 1:
        return None
    versions = torch.tensor([version for version, _ in parts], dtype=torch.int32)
    return versions.repeat_interleave(
        torch.tensor([len(sampled.token_ids) for _, sampled in parts])
    )


def _parted(groups: list[list[Row]]) -> list[list[Row]]:
    """Return the groups; a single one in two parts, which may fit one after the other."""
    if len(groups) > 1 or len(groups[0]) == 1:
        return groups
    middle = len(groups[0]) // 2
    return [groups[0][:middle], groups[0][middle:]]


def _no_memory() -> EngineError:
    return EngineError(
        "The GPU has no memory left for the keys and values of a single sequence: lower "
        "rollout.max_tokens or training.micro_batch_tokens."
    )


class _Ledger:
    """What each slot has sampled so far, and which have ended."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long)
        self.num_sampled: dict[int, int] = {}
        self.ended: set[int] = set()
        self.slots: list[Tensor] = []
        self.parts: list[SampledTokens] = []

    def num_left(self, rows: Sequence[Row]) -> int:
        """Return the most tokens that any of the running rows may still sample."""
        running = (row for row in rows if row.slot not in self.ended)
        return max((row.max_tokens - self.num_sampled[row.slot] for row in running), default=0)

    def has_ended(self, row: Row) -> bool:
        """Whether the row has a stop token or all its tokens."""
        return row.slot in self.ended

    def forget(self, row: Row) -> None:
        """Throw away what the row has sampled."""
        for number, slots in enumerate(self.slots):
            kept = slots != row.slot
            self.slots[number] = slots[kept]
            self.parts[number] = self.parts[number].map(lambda part, kept=kept: part[kept])
        del self.num_sampled[row.slot]

    def add(self, rows: Sequence[Row], sampled: SampledTokens) -> None:
        """Note tokens [t, n] of n rows: what follows a row's end is no part of it."""
        num_steps = len(sampled.token_ids)
        before = torch.tensor([self.num_sampled.get(row.slot, 0) for row in rows])
        was_over = torch.tensor([row.slot in self.ended for row in rows])
        max_tokens = torch.tensor([row.max_tokens for row in rows])
        number = before + torch.arange(num_steps)[:, None]
        is_end = torch.isin(sampled.token_ids, self.stops) | (number + 1 >= max_tokens)
        over = (is_end.cumsum(0) - is_end.long()).bool() | was_over
        counts = (~over).sum(0)
        for row, count, ends in zip(rows, counts.tolist(), is_end.any(0).tolist(), strict=True):
            self.num_sampled[row.slot] = self.num_sampled.get(row.slot, 0) + count
            if ends:
                self.ended.add(row.slot)
        slots = torch.tensor([row.slot for row in rows]).expand(num_steps, -1)
        self.slots.append(slots[~over])
        self.parts.append(sampled.map(lambda part: part[~over]))
        refuse_divergence(self.parts[-1].logp)

    def by_slot(self) -> dict[int, SampledTokens]:
        """Return one Sample a slot, whose tensors run over its positions."""
        slots = torch.cat(self.slots)
        # stable: the positions of a row stay in the order in which they were sampled
        order = slots.argsort(stable=True)
        names, lengths = slots[order].unique_consecutive(return_counts=True)
        columns = {
            name: part[order].split(lengths.tolist())
            for name, part in SampledTokens.joined(self.parts).tensors().items()
        }
        # copies: a view would take the tokens of all other rows along to another process
        return {
            slot: SampledTokens.of(
                {name: column[number].clone() for name, column in columns.items()}
            )
            for number, slot in enumerate(names.tolist())
        }
