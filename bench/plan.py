"""The memory plan of the default flags for GPUs that are not here: python -m bench.plan

Prints what the tables of docs/memory.md hold: for the shapes of Qwen2.5-1.5B and, with --lora_rank
32, Qwen2.5-7B; then for several GPUs of one machine, with ZeRO-3 and tensor_parallel.py --tp.
"""
import dataclasses
import os
from unittest import mock

import nano_rlvr as nr
from examples import tensor_parallel
from runtime import memory
from runtime.memory import ModelShape

SHAPES = {  # of Qwen's config.json files
    "Qwen3-0.6B": ModelShape(
        parameters=596_049_920,
        hidden=1024,
        layers=28,
        attention=2048,
        head_size=128,
        mlp=3072,
        vocab=151936,
        kv_cache=2 * 28 * 8 * 128,
        qk_norms=True),
    "Qwen3-1.7B": ModelShape(
        parameters=1_720_574_976,
        hidden=2048,
        layers=28,
        attention=2048,
        head_size=128,
        mlp=6144,
        vocab=151936,
        kv_cache=2 * 28 * 8 * 128,
        qk_norms=True),
    "Qwen2.5-1.5B": ModelShape(
        parameters=1_543_714_304,
        hidden=1536,
        layers=28,
        attention=1536,
        head_size=128,
        mlp=8960,
        vocab=151936,
        kv_cache=2 * 28 * 2 * 128,
        qk_norms=False),
    "Qwen2.5-7B": ModelShape(
        parameters=7_615_616_512,
        hidden=3584,
        layers=28,
        attention=3584,
        head_size=128,
        mlp=18944,
        vocab=152064,
        kv_cache=2 * 28 * 4 * 128,
        qk_norms=False),
    "Qwen2.5-32B": ModelShape(
        parameters=32_763_876_352,
        hidden=5120,
        layers=64,
        attention=5120,
        head_size=128,
        mlp=27648,
        vocab=152064,
        kv_cache=2 * 64 * 8 * 128,
        qk_norms=False),
}


def plan(model, gib, host=64, gpus=1, tp=1, **flags):
    """Prints the plan for GPUs of `gib` GiB in a machine with `host` GiB of memory."""
    os.environ.update(WORLD_SIZE=str(gpus), LOCAL_WORLD_SIZE=str(gpus))
    is_compiled = flags.get("zero_stage") != 3  # as with auto, on a GPU
    compile = "on" if is_compiled else "off"
    flags = {"compile": compile} | flags
    cfg = dataclasses.replace(nr.Config(), model=model, dtype="bfloat16", **flags)
    device = memory.Device(True, gib * memory.GIB, gib * memory.GIB, host * memory.GIB)
    with mock.patch.object(memory, "step_bytes", memory.step_bytes):  # restored afterwards
        tensor_parallel.plan_shards(tp)
        _, planned = memory.plan(cfg, device, SHAPES[model])
    print(planned["text"])


if __name__ == "__main__":
    for gib in (24, 40, 48, 80):
        plan("Qwen2.5-1.5B", gib)
    plan("Qwen2.5-7B", 24, lora_rank=32)
    plan("Qwen2.5-7B", 32, host=512, gpus=2, zero_stage=3, tp=2, kl_coef=0.0)
    plan("Qwen2.5-32B", 80, host=2048, gpus=8, zero_stage=3, tp=8, kl_coef=0.0)
