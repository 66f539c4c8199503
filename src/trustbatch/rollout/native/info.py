"""What the native engine declares about itself."""

from typing import TYPE_CHECKING, Any

from trustbatch.rollout.engine import EngineInfo, EngineSettings, RolloutEngine

if TYPE_CHECKING:
    from trustbatch.models.policy import Policy


class NativeInfo(EngineInfo):
    """An engine in the trainer's process, on the trainer's parameters."""

    name = "native"
    label = "native engine"
    shares_parameters = True
    supports_in_flight = True
    one_per_rank = True
    expandable_segments = True
    records_anchor_freely = True

    def loads_adapters(self, table: Any) -> bool:
        """Adapters alone: the frozen weights are the trainer's, or a replica's."""
        return True

    def build(self, policy: "Policy", settings: EngineSettings) -> RolloutEngine:
        """Build the engine; with prompts_per_call it gets a few prompts at a time."""
        from trustbatch.rollout.native.engine import NativeEngine
        from trustbatch.rollout.wrappers import ChunkedEngine

        engine = NativeEngine(
            policy,
            seed=settings.seed,
            version=settings.version,
            max_sequences=settings.max_sequences,
            precision=settings.precision,
            kv_precision=settings.kv_precision,
        )
        if settings.prompts_per_call is None:
            return engine
        return ChunkedEngine(engine, prompts_per_call=settings.prompts_per_call)


INFO = NativeInfo()
