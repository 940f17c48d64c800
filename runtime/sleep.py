"""Whose turn it is to use the GPU's memory: vLLM, the trainer or the reference. No moves without CUDA."""
import contextlib

import torch

from runtime import dist, lora, memory

vllm_threads = 1


def put_to_sleep(llm, engine=None):
    """vLLM frees its GPU memory (level 1: weights go to host memory, KV and prefix cache are dropped)."""
    global vllm_threads
    if torch.cuda.is_available():
        llm.sleep(level=1)
        vllm_threads = torch.get_num_threads()
        torch.set_num_threads(dist.CORES)  # vLLM and torchrun set 1; AdamW in host memory needs all
        if engine:
            lora.place_frozen_weights(engine, dist.device())


def wake_weights(llm, engine):
    """vLLM allocates its weights again, but not its KV cache: the sync may have no room for both."""
    if torch.cuda.is_available():
        torch.set_num_threads(vllm_threads)
        lora.place_frozen_weights(engine, "cpu")
        torch.cuda.empty_cache()  # vLLM cannot use what PyTorch has cached
        llm.wake_up(tags=["weights"])


def wake_kv_cache(llm):
    """vLLM allocates its KV cache again, which is empty, and can generate."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the sync left; vLLM 0.26 does not do this itself
        llm.wake_up(tags=["kv_cache"])
        torch.cuda.reset_peak_memory_stats()  # memory freed for vLLM must not count in the peak
    else:
        llm.reset_prefix_cache()  # on a GPU llm.sleep() has done it


@contextlib.contextmanager
def on_device(model):
    """Moves a module to the GPU, for this block or, if the memory plan has room, for good. For a block, its
    weights stay in host memory too, pinned: the GPU reads pinned memory several times as fast."""
    if memory.reference_stays:
        model.to(dist.device())
        yield
        return
    for p in model.parameters():
        if torch.cuda.is_available() and not p.is_pinned():
            p.data = p.data.pin_memory()
    in_host_memory = [(p, p.data) for p in model.parameters()]
    model.to(dist.device())
    yield
    for p, data in in_host_memory:
        p.data = data
