"""GEM: the games of the package gem-llm, by their ids."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trustbatch.errors import did_you_mean
from trustbatch.tasks.environments.host import EnvironmentHost
from trustbatch.tasks.environments.live import LiveEnvironment
from trustbatch.utils.imports import require_package


@dataclass(frozen=True, kw_only=True)
class Gem(LiveEnvironment):
    """A game of GEM, such as "game:GuessTheNumber-v0-easy"."""

    factory: str = field(default="trustbatch.tasks.environments.gem:make", init=False)
    id: str
    name: str = "gem"

    def __post_init__(self) -> None:
        require_package("gem", extra="gem", what="The task gem")
        super().__post_init__()

    def host(self) -> EnvironmentHost:
        """Return the function of a session's process, which alone imports the package."""
        options = {"id": self.id, "options": dict(self.options or {})}
        return EnvironmentHost(make, options, self.action, self.observation)


def make(id: str, options: Mapping[str, Any]) -> Any:
    """Make a game; runs in the process of a session."""
    import gem
    from gem.envs.registration import ENV_REGISTRY

    if id not in ENV_REGISTRY:
        raise ValueError(
            f"there is no environment {id!r}{did_you_mean(id, ENV_REGISTRY)}: set task.id to one "
            "of those that gem.print_envs() prints"
        )
    return gem.make(id, **options)
