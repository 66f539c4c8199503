"""Starting Ray so that only this machine can reach it, or joining a running cluster."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from trustbatch.cluster.keeper import kept
from trustbatch.cluster.private_folder import private_folder
from trustbatch.config import Config
from trustbatch.errors import ConfigError, EngineError

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""no usage statistics"""
LOOPBACK = {
    # makes Ray use 127.0.0.1 as the address of this machine, where all its servers listen
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
FORWARDED = (
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "PYTHONPATH",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
"""environment variables that processes on other machines get from this one"""
WORKING_FOLDER = "TRUSTBATCH_WORKING_FOLDER"
"""environment variable with the folder that relative paths of the configuration start from"""


def require_ray() -> None:
    """Raise ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "[cluster] needs Ray, which is not installed: run pip install 'trustbatch[ray]', or "
            "remove the table."
        )


@contextmanager
def joined_ray(config: Config) -> Iterator[None]:
    """Start or join Ray; on exit, shut down what was started."""
    assert config.cluster is not None
    require_ray()
    os.environ.update(QUIET)
    if not config.cluster.address or is_loopback(config.cluster.address):
        os.environ.update(LOOPBACK)  # before Ray is imported, since it reads them then
    import ray

    if ray.is_initialized():  # in an actor, or started by the caller
        yield
        return
    with ExitStack() as stack:
        folder = None
        if not config.cluster.address:
            folder = stack.enter_context(private_folder(config.run.path))
        stack.callback(ray.shutdown)
        with _own_sigterm():
            _join(config, folder)
        stack.enter_context(kept(config.run.path, folder))
        yield


def _join(config: Config, folder: Path | None) -> None:
    """Join the cluster at `cluster.address`, or start one with its files in `folder`."""
    import ray

    cluster = config.cluster
    assert cluster is not None
    try:
        if cluster.address:
            forwarded = {name: os.environ[name] for name in FORWARDED if name in os.environ}
            ray.init(
                address=cluster.address,
                runtime_env={
                    "env_vars": QUIET | forwarded | {WORKING_FOLDER: os.getcwd()},
                    "worker_process_setup_hook": f"{__name__}.{move_to.__name__}",
                },
                logging_level=logging.ERROR,
            )
        else:
            with own_gpu_hidden(config.model.device, trainers=cluster.trainers):
                ray.init(
                    address="local",
                    # Ray's CPUs only limit the number of processes, and all of these must run
                    num_cpus=cluster.trainers + cluster.engines + cluster.reward_workers,
                    include_dashboard=False,
                    _temp_dir=str(folder),
                    logging_level=logging.ERROR,
                    log_to_driver=cluster.trainers > 1,
                )
            _refuse_other_than_loopback()
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if not cluster.address:
            raise EngineError(
                f"Ray can't be started on this machine ({first}): see its logs for the reason."
            ) from error
        raise EngineError(
            f"Ray at {cluster.address} can't be joined ({first}): check cluster.address and, if "
            "the cluster requires a token, set RAY_AUTH_MODE=token and the token as Ray's "
            "documentation describes; or remove the address to start Ray on this machine."
        ) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces by one that exits at once."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    is_main = threading.current_thread() is threading.main_thread()  # others can't set handlers
    if is_main and callable(handler):
        signal.signal(signal.SIGTERM, handler)


def is_loopback(address: str) -> bool:
    """Whether an address, with or without a port, is a loopback address."""
    host = address.rpartition(":")[0] or address
    return host == "localhost" or host.startswith("127.") or host.strip("[]") == "::1"


def move_to() -> None:
    """Change to the folder in which the run was started, if this machine has it."""
    folder = os.environ[WORKING_FOLDER]
    if os.path.isdir(folder):
        os.chdir(folder)


def _refuse_other_than_loopback() -> None:
    """Shut Ray down if it was imported too early to be restricted to loopback."""
    import ray

    address = ray.util.get_node_ip_address()
    if address != "127.0.0.1":
        ray.shutdown()
        raise EngineError(
            f"Ray was imported before the run and would listen on the network ({address}): import "
            "it after trustbatch.train, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before."
        )


@contextmanager
def own_gpu_hidden(device: str, *, trainers: int) -> Iterator[None]:
    """Reserve a GPU for training in this process, if there are others for Ray.

    It is the one that `model.device` names (default: the first).
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
