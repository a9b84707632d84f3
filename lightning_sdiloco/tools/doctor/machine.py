"""Describes the machine of a rank: versions, variables of its environment, and the TCP settings of its system."""

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("lightning-sdiloco", "torch", "lightning", "pytorch-lightning")

# What changes how ranks talk to each other, or how fast they are.
VARIABLES = ("GLOO_SOCKET_IFNAME", "SDILOCO_EXCHANGE_INTERFACE", "OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG")

_TCP = Path("/proc/sys/net/ipv4")


def describe() -> dict[str, Any]:
    """Describes the machine of this rank: values that JSON can express."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cores": os.cpu_count() or 1,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "tcp": {
            "congestion_control": _read("tcp_congestion_control"),
            "send_buffer": _last_number("tcp_wmem"),
            "receive_buffer": _last_number("tcp_rmem"),
            "slow_start_after_idle": _read("tcp_slow_start_after_idle") == "1",
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _read(name: str) -> str:
    try:
        return (_TCP / name).read_text().strip()
    except OSError:
        return ""


def _last_number(name: str) -> int:
    """Returns the last number of a setting: the maximal size of a buffer in bytes. 0 where the system does not tell."""
    numbers = _read(name).split()
    return int(numbers[-1]) if numbers else 0
