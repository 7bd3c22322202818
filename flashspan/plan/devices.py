"""A table of devices and links. Users add others in a TOML file with the same fields.

    [devices.my-gpu]
    flops = 200e12          # dense 16-bit operations per second, data sheet
    flops32 = 50e12         # float32, not TF32
    memory = 48e9           # bytes
    bandwidth = 0.9e12      # bytes per second
    [links.my-link]
    latency = 5e-6          # seconds
    bandwidth = 25e9        # bytes per second, one direction, of one device

Data sheets give upper bounds, of which kernels reach fractions (`product_share`, ...). The default fractions are from
public measurements; `calibrate` replaces them by measured ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashspan.files import parse_toml, read_bytes

MOST_DEVICES = 10**6
"""The most devices in a cluster: more than any cluster has, and few enough for the search to end."""


@dataclass(frozen=True)
class Device:
    """The peak rates of one device, and the fractions that kernels reach."""

    name: str
    flops: float
    flops32: float
    memory: float
    bandwidth: float
    product_share: float = 0.70  # of flops, in large matmuls
    forward_share: float = 0.50  # of flops, in attention forward over full tiles
    backward_share: float = 0.42  # of flops, in attention backward
    traffic_share: float = 0.75  # of bandwidth, in memory-bound operators
    interference: float = 0.12  # of the speed, lost during a transfer: its kernel uses multiprocessors
    launch: float = 5e-6  # seconds of the host per operator, a lower bound on the device
    reserve: float = 1.0e9  # bytes of the CUDA context, libraries and fragmentation

    def __post_init__(self) -> None:
        for name in ("flops", "flops32", "memory", "bandwidth", "launch"):
            self._require(name, "positive and finite", 0 < getattr(self, name) < math.inf)
        for name in ("product_share", "forward_share", "backward_share", "traffic_share"):
            self._require(name, "above 0 and at most 1", 0 < getattr(self, name) <= 1)
        self._require("interference", "from 0 to 1", 0 <= self.interference <= 1)
        self._require("reserve", "0 or more and finite", 0 <= self.reserve < math.inf)

    def _require(self, name: str, rule: str, holds: bool) -> None:
        if not holds:
            raise ValueError(f"a device's {name} must be {rule}: {self.name} has {getattr(self, name)}")

    def peak(self, itemsize: int, *, tf32: bool = False) -> float:
        """Peak FLOPS of matmuls with this element size; tf32 has half the peak of 16 bits."""
        if itemsize == 2:
            return self.flops
        return self.flops / 2 if tf32 else self.flops32


@dataclass(frozen=True)
class Link:
    """A link out of one device: a transfer takes latency + bytes / bandwidth."""

    name: str
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and 0 < self.bandwidth < math.inf):
            raise ValueError(
                f"a link needs latency >= 0 and bandwidth > 0, both finite: {self.name} has {self.latency}, "
                f"{self.bandwidth}"
            )

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


# The bandwidth of a link is the one that point-to-point transfers reach, about 80% of the data sheet's (one direction).
DEVICES = {
    "H200": Device("H200", 989e12, 67e12, 141e9, 4.8e12),
    "H200-NVL": Device("H200-NVL", 835e12, 60e12, 141e9, 4.8e12),
    "H100": Device("H100", 989e12, 67e12, 80e9, 3.35e12),
    "H100-NVL": Device("H100-NVL", 835e12, 60e12, 94e9, 3.9e12),
    "H100-PCIe": Device("H100-PCIe", 756e12, 51e12, 80e9, 2.0e12),
    "H800": Device("H800", 989e12, 67e12, 80e9, 3.35e12),
    "A100": Device("A100", 312e12, 19.5e12, 80e9, 2.0e12, forward_share=0.62, backward_share=0.52),
    "B200": Device("B200", 2250e12, 80e12, 180e9, 8.0e12),
    "L40S": Device("L40S", 362e12, 91e12, 48e9, 0.86e12),
    "L40": Device("L40", 181e12, 90e12, 48e9, 0.86e12),
    "RTX4090": Device("RTX4090", 165e12, 82e12, 24e9, 1.0e12),
    "RTX4050": Device("RTX4050", 36e12, 9e12, 6e9, 0.19e12),
    "cpu-core": Device("cpu-core", 60e9, 60e9, 12e9, 10e9, launch=20e-6, reserve=0.3e9),
}
LINKS = {
    "nvlink-h100": Link("nvlink-h100", 8e-6, 360e9),
    "nvlink-h800": Link("nvlink-h800", 8e-6, 160e9),
    "nvlink-a100": Link("nvlink-a100", 8e-6, 240e9),
    "nvlink-b200": Link("nvlink-b200", 8e-6, 720e9),
    "pcie4": Link("pcie4", 10e-6, 22e9),
    "pcie5": Link("pcie5", 10e-6, 45e9),
    "ib-ndr": Link("ib-ndr", 12e-6, 45e9),
    "ib-hdr": Link("ib-hdr", 12e-6, 22e9),
    "ethernet-100g": Link("ethernet-100g", 30e-6, 10e9),
    "loopback": Link("loopback", 200e-6, 1.5e9),
}
# Bridges connect only two or four cards, so the link between all cards of a node is PCIe.
USUAL_LINK = {
    "H200": "nvlink-h100",
    "H200-NVL": "pcie5",
    "H100": "nvlink-h100",
    "H100-NVL": "pcie5",
    "H100-PCIe": "pcie5",
    "H800": "nvlink-h800",
    "A100": "nvlink-a100",
    "B200": "nvlink-b200",
    "L40S": "pcie4",
    "L40": "pcie4",
    "RTX4090": "pcie4",
    "RTX4050": "pcie4",
    "cpu-core": "loopback",
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices: one link inside a node, another between nodes (per device)."""

    device: Device
    num_devices: int
    per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ValueError(f"a cluster needs 1 or more devices: got {self.num_devices}")
        if self.per_node < 1:
            raise ValueError(f"a node needs 1 or more devices: got {self.per_node} per node")
        if self.num_devices > MOST_DEVICES:
            raise ValueError(
                f"a cluster has at most {MOST_DEVICES:,} devices: got {self.num_devices:,}; plan for fewer"
            )

    def link(self, first: int, second: int) -> Link:
        """The link between two devices."""
        return self.inside if first // self.per_node == second // self.per_node else self.between

    def slowest(self, num: int, stride: int = 1) -> Link:
        """The slowest link in a group of `num` devices with this stride."""
        return self.inside if (num - 1) * stride + 1 <= self.per_node else self.between

    def resized(self, num_devices: int) -> Cluster:
        return dataclasses.replace(self, num_devices=num_devices)


def make_cluster(
    device: str,
    num_devices: int,
    *,
    per_node: int = 8,
    inside: str | None = None,
    between: str = "ib-ndr",
    table: Path | None = None,
) -> Cluster:
    """A cluster from the names of its device and links, in our table or in a user's file."""
    devices, links = load_table(table)
    chosen = devices[_find(device, devices, "device")]
    inner = inside or USUAL_LINK.get(device, "pcie4")
    return Cluster(
        chosen,
        num_devices,
        per_node,
        links[_find(inner, links, "link")],
        links[_find(between, links, "link")],
    )


def load_table(path: Path | None = None) -> tuple[dict[str, Device], dict[str, Link]]:
    """All known devices and links, including those of a user's TOML file."""
    devices, links = dict(DEVICES), dict(LINKS)
    if path is None:
        return devices, links
    text = read_bytes(path, "give --table a TOML file of devices and links, or omit it")
    try:
        data = parse_toml(text.decode())
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"{path} is not a TOML file of devices and links: {error}") from error
    for section, kind, known in (("devices", Device, devices), ("links", Link, links)):
        entries = data.pop(section, {})
        if not isinstance(entries, Mapping):
            raise ValueError(f"{path}: {section} must be tables, [{section}.NAME]: got {entries!r}")
        for name, values in entries.items():
            known[name] = _make(kind, name, values, known.get(name), path)
    if data:
        raise ValueError(f"{path} may have the sections devices and links: got {', '.join(data)}")
    return devices, links


def is_named(device: str, whole: str) -> bool:
    """Whether RTX4090 is the short name of "NVIDIA GeForce RTX 4090", or cpu-core of "x86_64, 2 cores".

    An H100 PCIe does not count as H100: if several names in the table match, the longest is used.
    """
    if device.startswith("cpu"):
        return "cores" in whole
    words = _plain(whole)
    longer = [_plain(name) for name in DEVICES if name != device and _plain(name).startswith(_plain(device))]
    return _plain(device) in words and not any(name in words for name in longer)


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")


def _make(kind: type[Any], name: str, values: Any, base: Any, path: Path) -> Any:
    allowed = {field.name for field in dataclasses.fields(kind)} - {"name"}
    if not isinstance(values, Mapping) or set(values) - allowed:
        extra = ", ".join(sorted(set(values) - allowed)) if isinstance(values, Mapping) else repr(values)
        raise ValueError(f"{path}: {name} may have {', '.join(sorted(allowed))}: got {extra}")
    for key, value in values.items():
        if type(value) not in (int, float):
            raise ValueError(f"{path}: {key} of {name} must be a number: got {value!r}")
    try:
        numbers = {key: float(value) for key, value in values.items()}
        return dataclasses.replace(base, **numbers) if base is not None else kind(name=name, **numbers)
    except TypeError as error:
        needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name != "name"]
        raise ValueError(
            f"{path}: a new {kind.__name__.lower()} needs {', '.join(needed)}: {name} lacks some"
        ) from error
    except (ValueError, OverflowError) as error:  # the latter: an integer too large for a float
        raise ValueError(f"{path}: {error}; change [{kind.__name__.lower()}s.{name}]") from error


def _find(name: str, known: Mapping[str, object], kind: str) -> str:
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"unknown {kind} {name!r}: {hint}choose one of {', '.join(known)}, or add it with --table FILE")


def available_bytes() -> float | None:
    """The available memory of this machine; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def free_gpu_bytes() -> float:
    """The free memory of the first GPU, or its total memory without nvidia-smi.

    torch.cuda.mem_get_info would create a CUDA context in this process, which takes hundreds of MiB.
    """
    import torch

    gpu = torch.cuda.get_device_properties(0)
    command = ["nvidia-smi", f"--id=GPU-{gpu.uuid}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return float(found.stdout) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):  # not installed, no such GPU (MIG), or no number
        return float(gpu.total_memory)
