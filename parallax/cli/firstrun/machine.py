"""The machine, for an issue: devices, versions and flags, without names of hosts, users or folders."""

import getpass
import os
import platform
import re
import socket
import sys
from pathlib import Path

import jax
from jax.extend.backend import get_backend

from parallax.analysis.devices import device_memory
from parallax.runtime.units import in_bytes
from parallax.runtime.version import code_version, version_of, versions

# What drives the devices, where it is installed.
DRIVERS = (
    *("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SETTINGS = ("XLA_", "LIBTPU_INIT_ARGS", "NCCL_", "CUDA_DEVICE_", "JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION")
# Of a private network, or with a port: versions have four numbers, too.
ADDRESS = re.compile(r"\b(?:\d{1,3}(?:\.\d{1,3}){3}:\d+|(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3})\b")
SHORTEST_NAME = 4  # letters: a shorter name of a host would be found in words


def devices() -> dict[str, str]:
    """The devices: how many, of which kind, where they lie, and what they hold."""
    first, here = jax.devices()[0], jax.local_devices()
    held = device_memory()
    return {
        "devices": f"{jax.device_count()} x {first.device_kind} ({first.platform})",
        "processes": f"{jax.process_count()}, {len(here)} devices in each",
        "topology": topology(),
        "memory of a device": "not said by the backend" if held is None else in_bytes(held),
        "backend": " ".join(get_backend().platform_version.split()),
    }


def topology() -> str:
    """Extents of the torus and the number of slices, as far as devices have a place.

    >>> topology()
    'none: devices say no coordinates'
    """
    places = [device.coords for device in jax.devices() if getattr(device, "coords", None) is not None]
    if not places:
        return "none: devices say no coordinates"
    slices = {getattr(device, "slice_index", 0) for device in jax.devices()}
    extents = "x".join(str(max(dim) - min(dim) + 1) for dim in zip(*places))
    return f"{extents}, {len(slices)} slice{'s' * (len(slices) > 1)}"


def software() -> dict[str, str]:
    """Versions, and what the environment tells the compiler."""
    known = {"parallax": code_version(), "python": platform.python_version(), **versions()}
    known |= {name: version_of(name) for name in DRIVERS if version_of(name) != "not installed"}
    known["system"] = platform.system()
    if NVIDIA_DRIVER.is_file():
        known["driver"] = NVIDIA_DRIVER.read_text().splitlines()[0]
    return known


def flags() -> dict[str, str]:
    """The environment's settings of XLA, NCCL and JAX."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}


def nameless(text: str) -> str:
    """The text without names of this machine's host, user and folders, and without addresses.

    >>> nameless(f"{Path.home()}/corpus, 10.0.0.2:8476")
    '~/corpus, <address>'
    """
    for folder, instead in ((Path.cwd(), "."), (Path(sys.prefix), "<python>"), (Path.home(), "~")):
        if folder != Path(folder.anchor):
            text = text.replace(str(folder), instead)
    text = ADDRESS.sub("<address>", text)
    for name in (socket.gethostname(), socket.gethostname().split(".")[0]):
        if len(name) >= SHORTEST_NAME:
            text = re.sub(rf"\b{re.escape(name)}\b", "<host>", text)
    return re.sub(rf"(?<=/){re.escape(_user())}(?=/|\b)|\b{re.escape(_user())}(?=@)", "<user>", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return str(os.getuid())
