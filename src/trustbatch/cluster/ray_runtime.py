"""Starting Ray so that only this machine can reach it, or joining a cluster that is there."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from trustbatch.config import Config
from trustbatch.errors import ConfigError, EngineError

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""nothing is reported to anybody"""
LOOPBACK = {
    # Ray then takes 127.0.0.1 for the address of this machine, and all its servers listen there
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
HANDED_ON = (
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "PYTHONPATH",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
"""what processes on other machines need to know of this one's environment"""
STARTED_IN = "TRUSTBATCH_STARTED_IN"
"""names the folder from which paths of the configuration go out"""


def require_ray() -> None:
    """Refuse to go on where Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "[cluster] needs Ray, which is not installed: run pip install 'trustbatch[ray]', or "
            "remove the table."
        )


@contextmanager
def joined_ray(config: Config) -> Iterator[None]:
    """Have Ray at hand; what was started for it ends with it."""
    assert config.cluster is not None
    require_ray()
    os.environ.update(QUIET)
    if not config.cluster.address or is_loopback(config.cluster.address):
        os.environ.update(LOOPBACK)  # before Ray is imported: it reads them then
    import ray

    if ray.is_initialized():  # in an actor, or where the caller has started it
        yield
        return
    _join(config)
    try:
        yield
    finally:
        ray.shutdown()


def _join(config: Config) -> None:
    import ray

    cluster = config.cluster
    assert cluster is not None
    try:
        if cluster.address:
            handed_on = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
            ray.init(
                address=cluster.address,
                runtime_env={
                    "env_vars": QUIET | handed_on | {STARTED_IN: os.getcwd()},
                    "worker_process_setup_hook": f"{__name__}.{move_to.__name__}",
                },
                logging_level=logging.ERROR,
            )
        else:
            with own_gpu_hidden(config.model.device, trainers=cluster.trainers):
                ray.init(
                    address="local",
                    # what is counted is how many processes may run, and all of these shall
                    num_cpus=cluster.trainers + cluster.engines + cluster.reward_workers,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    log_to_driver=cluster.trainers > 1,
                )
            _refuse_other_than_loopback()
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if not cluster.address:
            raise EngineError(
                f"Ray can't be started on this machine ({first}): see why in its logs."
            ) from error
        raise EngineError(
            f"Ray at {cluster.address} can't be joined ({first}): check cluster.address and, if "
            "the cluster asks for a token, set RAY_AUTH_MODE=token and the token as Ray's "
            "documentation says; or remove the address to start Ray on this machine."
        ) from error


def is_loopback(address: str) -> bool:
    """Whether an address, with or without a port, is of this machine alone."""
    host = address.rpartition(":")[0] or address
    return host == "localhost" or host.startswith("127.") or host.strip("[]") == "::1"


def move_to() -> None:
    """Have a process work in the folder that the run was started in, where its machine has it."""
    folder = os.environ[STARTED_IN]
    if os.path.isdir(folder):
        os.chdir(folder)


def _refuse_other_than_loopback() -> None:
    """End Ray again if it was imported too early to learn from where it may be reached."""
    import ray

    address = ray.util.get_node_ip_address()
    if address != "127.0.0.1":
        ray.shutdown()
        raise EngineError(
            f"Ray was imported before the run and would listen to the network ({address}): import "
            "it after trustbatch.train, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before."
        )


@contextmanager
def own_gpu_hidden(device: str, *, trainers: int) -> Iterator[None]:
    """Keep a GPU for the training in this process, where there are others for Ray.

    It is the one that `model.device` names, or else the first.
    """
    if trainers > 1 or torch.cuda.device_count() < 2:
        yield
        return
    before = os.environ.get(VISIBLE_GPUS)
    all_gpus = before.split(",") if before else map(str, range(torch.cuda.device_count()))
    own = 0 if device == "auto" else torch.device(device).index or 0
    others = [gpu for number, gpu in enumerate(all_gpus) if number != own]
    os.environ[VISIBLE_GPUS] = ",".join(others)
    try:
        yield
    finally:
        del os.environ[VISIBLE_GPUS]
        if before is not None:
            os.environ[VISIBLE_GPUS] = before
