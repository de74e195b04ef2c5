"""Checks of the memory of this machine's GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specpilot.controller.doctor.report import MEMORY, Check
from specpilot.controller.doctor.server_arguments import ExaminedServer
from specpilot.sglang_hooks.settings import Settings

LOW_GIGABYTES = 1.0
"""GB left on a GPU after the start below which memory is short: prefills allocate their activations from it."""


@dataclass(frozen=True)
class Gpu:
    """Memory of one GPU in bytes."""

    index: int
    name: str
    uuid: str
    total: int
    used: int


def read_gpus() -> list[Gpu]:
    """Return this machine's NVIDIA GPUs; ImportError without nvidia-ml-py, OSError without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = []
        for index, handle in enumerate(handles):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            found.append(Gpu(index, str(name), str(uuid), int(memory.total), int(memory.used)))
        return found
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def visible(gpus: Sequence[Gpu], devices: str | None) -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` names, by index or UUID; all of them if it is not set."""
    if devices is None:
        return list(gpus)
    names = [name.strip() for name in devices.split(",") if name.strip()]
    return [gpu for gpu in gpus if any(name == str(gpu.index) or gpu.uuid.startswith(name) for name in names)]


def check_gpus(
    settings: Settings | None, server: ExaminedServer | None, started: bool, devices: str | None
) -> Iterator[Check]:
    """Check this machine's GPUs against the ring; ``started``: a server holds its memory there already.

    ``devices``: ``CUDA_VISIBLE_DEVICES``, None if it is not set.
    """
    try:
        gpus = visible(read_gpus(), devices)
    except ImportError:
        yield MEMORY.not_checked("GPU memory: nvidia-ml-py is not installed here")
        return
    except OSError as error:
        yield MEMORY.not_checked(f"GPU memory: no NVIDIA driver answers here ({error})")
        return
    if not gpus:
        yield MEMORY.not_checked("GPU memory: no NVIDIA GPU is visible here")
    ring = settings.skip_ring_mb << 20 if settings is not None and settings.skip == "decode" else 0
    fraction = server.get("mem_fraction_static") if server is not None else None
    for gpu in gpus:
        yield judge_gpu(gpu, ring, fraction, started)


def judge_gpu(gpu: Gpu, ring: int, fraction: float | None, started: bool) -> Check:
    """Judge one GPU; ``ring`` in bytes, ``fraction`` as in --mem-fraction-static if that is known.

    SGLang gives weights and KV pool that fraction, before graphs and ring are made of the rest.
    """
    said = f"GPU {gpu.index} ({gpu.name}): {gpu.used / 1e9:.1f} of {gpu.total / 1e9:.1f} GB are used"
    free = gpu.total - gpu.used
    if started:
        if free < LOW_GIGABYTES * 1e9:
            return MEMORY.warning(
                said, "lower --mem-fraction-static, the number of candidates or SPECPILOT_SKIP_RING_MB"
            )
        return MEMORY.ok(said)
    if free < ring:
        return MEMORY.warning(
            f"{said}: less is free than SPECPILOT_SKIP_RING_MB may take ({ring / 1e9:.1f} GB)",
            "if the server is to run there, end what uses that GPU",
        )
    if fraction is not None:
        rest = gpu.total * (1 - fraction)
        said += f"; --mem-fraction-static {fraction:g} leaves {rest / 1e9:.1f} GB for graphs, activations and the ring"
        if rest < ring:
            return MEMORY.problem(said, f"lower it, or SPECPILOT_SKIP_RING_MB ({ring / 1e9:.1f} GB)")
    return MEMORY.ok(f"{said}; the ring may take {ring / 1e9:.1f} GB" if ring else said)
