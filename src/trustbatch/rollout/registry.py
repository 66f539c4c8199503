"""The registry of rollout engines: a new engine is a package beside this file and one line here."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trustbatch.rollout.engine import EngineInfo

ENGINES = {
    "native": "trustbatch.rollout.native.info",
    "vllm": "trustbatch.rollout.vllm.info",
}
"""value of rollout.engine -> module whose INFO is an `EngineInfo`"""
DEFAULT_ENGINE = "native"


def engine_names() -> tuple[str, ...]:
    """Return all values of rollout.engine."""
    return tuple(ENGINES)


def engine_tables() -> dict[str, str]:
    """Return the name of each engine's own table of [rollout], for those that have one."""
    tables = {name: engine_info(name).config_table for name in ENGINES}
    return {name: table for name, table in tables.items() if table is not None}


def engine_info(name: str) -> "EngineInfo":
    """Return what an engine declares; its heavy modules are imported when it is built."""
    return import_module(ENGINES[name]).INFO
