"""[cluster]: generation and training in processes of their own, on Ray."""

from typing import Literal

from pydantic import Field, model_validator

from trustbatch.utils.tables import Changeable, Table


class ClusterConfig(Table):
    """[cluster]: generation beside training, in processes of their own, on Ray."""

    engines: Changeable[int] = Field(default=2, ge=1)
    """rollout engines, each with a copy of the policy"""
    trainers: Changeable[int] = Field(default=1, ge=1)
    """processes that train together; a single one is the process that was started"""
    reward_workers: Changeable[int] = Field(default=1, ge=0)
    """processes that grade; 0 grades in the first trainer's process"""
    max_lag: int = Field(default=1, ge=0)
    """policy versions between sampling and training; 0 takes turns, as without a cluster"""
    reuse: int = Field(default=1, ge=1)
    """steps in a row that train on the same batch"""
    in_flight: bool = False
    """let engines load new versions while they sample: a completion may span several"""
    address: Changeable[str] = ""
    """of an existing Ray cluster; "" starts one that only this machine can reach"""
    engine_gpus: Changeable[float | None] = Field(default=None, ge=0.0)
    """GPUs per engine; default: 1, with vLLM tensor_parallel, and 0 on a CPU"""
    weight_transfer: Changeable[Literal["auto", "process_group", "shared_memory", "disk"]] = "auto"
    """how new weights reach the engines; "auto" is process_group between GPUs with room"""
    transfer_folder: Changeable[str | None] = None
    """for weights on disk, seen by all machines; default: the run folder"""
    max_restarts: Changeable[int] = Field(default=3, ge=0)
    """times in a row that the same work may end with the death of its process"""
    start_seconds: Changeable[float] = Field(default=900.0, gt=0.0)
    generate_seconds: Changeable[float] = Field(default=3600.0, gt=0.0)
    grade_seconds: Changeable[float] = Field(default=3600.0, gt=0.0)
    train_seconds: Changeable[float] = Field(default=7200.0, gt=0.0)
    transfer_seconds: Changeable[float] = Field(default=600.0, gt=0.0)

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.reuse > self.max_lag + 1:
            raise ValueError(
                f"cluster.reuse = {self.reuse} trains on a batch when it is {self.reuse - 1} "
                f"versions old at least: set cluster.max_lag to {self.reuse - 1} or more"
            )
        if self.engine_gpus is not None and self.engine_gpus > 1 and self.engine_gpus % 1:
            raise ValueError(
                f"cluster.engine_gpus = {self.engine_gpus:g} is neither a fraction of one GPU nor "
                "a whole number of GPUs: round it"
            )
        if self.transfer_folder is not None and self.weight_transfer != "disk":
            raise ValueError(
                'cluster.transfer_folder requires cluster.weight_transfer = "disk": set that, or '
                "remove the folder"
            )
        return self
