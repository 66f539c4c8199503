"""Running a training on a cluster: in this process, or in as many as [cluster] asks for."""

import os
from collections.abc import Callable
from typing import TypeVar

from trustbatch.cluster.ray_runtime import joined_ray
from trustbatch.config import Config
from trustbatch.errors import ConfigError
from trustbatch.plan.demand import Demand
from trustbatch.tasks import Task

Result = TypeVar("Result")
IsAskedToStop = Callable[[], bool]
Train = Callable[[Config, Task | None, IsAskedToStop | None], Result]


def train_on_cluster(
    config: Config, task: Task | None, train: Train[Result], is_asked_to_stop: IsAskedToStop | None
) -> Result:
    """Call `train` where the configuration says, with Ray running."""
    assert config.cluster is not None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "[cluster] starts its trainers itself: run the command without torchrun, and set "
            "cluster.trainers."
        )
    with joined_ray(config):
        from trustbatch.cluster.placement import machines

        nodes = machines()
        demand = Demand.of(config, nodes)
        if obstacle := demand.obstacle(nodes):
            raise ConfigError(obstacle)
        if not demand.trainers.size:
            return train(config, task, is_asked_to_stop)
        from trustbatch.cluster.trainers import train_together

        return train_together(config, task, train, is_asked_to_stop)
