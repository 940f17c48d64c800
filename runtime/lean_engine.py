"""Less of vLLM's Python per sampled token, with the same results, bit by bit.

A device waits for this Python at each decode step: of a rollout beside an H100 it is the slowest
part. All of it was read in vLLM 0.31; what it touches is in vllm_patches.SURFACE.
"""
import copy
import functools
import operator

import numpy as np

from runtime import ranks, vllm_patches
from runtime.vllm_patches import VERSION

SLOWER = "vLLM's engine runs as it is, which is slower"
# What the attributes of vLLM's scheduler must be: no connector, no speculation, no statistics
PLAIN_SCHEDULER = dict(
    log_stats=False, finished_req_ids_dict=None, connector=None, ec_connector=None,
    aux_output_connector=None, num_spec_tokens=0, num_sampled_tokens_per_step=1,
    num_lookahead_tokens=0, use_pp=False, needs_kv_cache_zeroing=False, prefix_replay_tokens=0,
    return_sampling_mask=False, enable_kv_cache_events=False)
# The parameters of a request that may have any value. Of the others, the values of `needed` below.
FREE_PARAMETERS = {
    "n", "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens",
    "stop_token_ids", "ignore_eos", "skip_clone", "_eos_token_id", "_all_stop_token_ids"}


def lean_engine(llm):
    """A LeanEngine in vLLM, or None, with a note, if this vLLM or model does not fit it."""
    version = vllm_patches.version()
    if not version.startswith(f"{VERSION}."):
        ranks.print_once(f"note: {SLOWER}, because this is vLLM {version}, not {VERSION}")
        return None
    if not vllm_patches.fits("LeanEngine", SLOWER):
        return None
    if reason := misfit(llm.llm_engine.engine_core.engine_core):
        ranks.print_once(f"note: {SLOWER}, because {reason}")
        return None
    return LeanEngine(llm)


def misfit(core):
    """What of vLLM's EngineCore a LeanEngine does not know, or ""."""
    scheduler = core.scheduler
    for name, value in PLAIN_SCHEDULER.items():
        if getattr(scheduler, name) != value:
            return f"{name} is {getattr(scheduler, name)}"
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    if groups != 1:  # models with Mamba layers, or with sliding windows in some layers
        return f"the model has {groups} kinds of KV cache"
    if core.async_scheduling and not scheduler.use_v2_model_runner:
        return "vLLM's first model runner is asynchronous"
    if scheduler.max_num_running_reqs > scheduler.max_num_scheduled_tokens:
        return "more sequences may run than a step has tokens"
    return ""


class LeanEngine:
    """vLLM's scheduler passes over all requests twice per decode step: schedule() counts a token
    and asks for room, update_from_output() appends the token and looks whether the request ends.
    Here a request that decodes has a row in arrays, from its first token until it ends:

    1. Deferred outputs: its tokens and log-probs wait in the arrays. vLLM gets them in one piece,
       when a block of its KV cache is full, and before a token that may end it. vLLM itself decides
       whether it ends.
    2. Steady schedule: if all requests decode and none can join, the next step is made from the
       arrays. A request asks for room only at the end of a block.

    vLLM takes the same steps with the same requests and blocks, so that all results are the same.
    Requests with other parameters than `needed` go vLLM's own way, also beside such ones."""

    def __init__(self, llm):
        engine = llm.llm_engine
        self.scheduler = engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.states = engine.output_processor.request_states
        [group] = self.scheduler.kv_cache_config.kv_cache_groups
        self.block_size = group.kv_cache_spec.block_size
        self.on = True  # False: no further request gets a row
        self.make_rows(self.scheduler.max_num_running_reqs)
        vocabulary = engine.model_config.get_vocab_size()
        self.may_end = np.zeros(vocabulary, bool)  # the stop tokens of all rows
        self.replace_methods()

    def make_rows(self, count):
        self.row = {}  # id of a request -> its row
        self.free_rows = list(range(count))
        self.requests = [None] * count  # vLLM's Request of each row
        self.prompt = np.zeros(count, int)  # tokens of the prompt
        self.length = np.zeros(count, int)  # tokens of prompt and completion
        self.computed = np.zeros(count, int)  # with keys and values, or soon
        self.end = np.zeros(count, int)  # the length at which the request ends at the latest
        self.blocks = np.zeros(count, int)  # full ones, which are in the prefix cache
        self.held = np.zeros(count, int)  # tokens that wait here: of one block and two steps
        most = 2 * self.block_size
        self.tokens = np.zeros((count, most), np.int32)
        self.logps = np.zeros((count, most), np.float32)
        self.ranks = np.zeros((count, most), np.int32)
        self.forget_orders()

    def replace_methods(self):
        scheduler, manager = self.scheduler, self.manager
        self.vllm_schedule = scheduler.schedule
        self.vllm_update = scheduler.update_from_output
        self.vllm_preempt = scheduler._preempt_request
        self.vllm_free = scheduler._free_request
        self.vllm_allocate = manager.allocate_slots
        scheduler.schedule = self.schedule
        scheduler.update_from_output = self.update_from_output
        scheduler._preempt_request = self.preempt_request
        scheduler._free_request = self.free_request
        manager.allocate_slots = self.allocate_slots

    # ---- which requests have a row

    @functools.cached_property
    def needed(self):
        """(a function of SamplingParams -> a tuple, what the tuple must be)."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        names = [name for name in SamplingParams.__struct_fields__ if name not in FREE_PARAMETERS]
        values = operator.attrgetter(*names)
        params = SamplingParams(logprobs=0, flat_logprobs=True, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        return values, values(params)

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
        self.blocks[row] = (request.num_tokens - 1) // self.block_size
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
        count = self.held[row].item()
        if not count:
            return
        request = self.requests[row]
        tokens, logps, token_ranks = (
            array[row, :count].tolist() for array in (self.tokens, self.logps, self.ranks))
        self.held[row] = 0
        request.num_output_placeholders -= count
        request.append_output_token_ids(tokens)
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

    # ---- 1. deferred outputs

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
        for row in ending:
            self.hand_over(row)
        return self.others | {self.requests[row].request_id for row in ending}

    def find_rows(self, names):
        """The requests of an output that have a row: their columns in the output, their rows."""
        self.columns = np.array(
            [i for i, name in enumerate(names) if name in self.row], int)
        self.rows = np.array([self.row[names[i]] for i in self.columns], int)
        self.others = {name for name in names if name not in self.row}
        self.output_ids = names

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

    # ---- 2. steady schedule

    def schedule(self, throttle_prefills=False):
        """Scheduler.schedule. It sees the requests as if no token waited here."""
        if self.is_steady():
            return self.next_step()
        self.write_back(list(self.row.values()))
        output = self.vllm_schedule(throttle_prefills)
        for row in self.row.values():
            self.computed[row] = self.requests[row].num_computed_tokens
        return output

    def allocate_slots(self, request, *args, **kwargs):
        """KVCacheManager.allocate_slots: of a request with a row only at the end of a block. It
        puts the block into the prefix cache, by its tokens, and gives the next one."""
        row = self.row.get(request.request_id)
        if row is None:
            return self.vllm_allocate(request, *args, **kwargs)
        if not self.at_block_end(row):
            return self.manager.empty_kv_cache_blocks
        self.hand_over(row)
        new = self.vllm_allocate(request, *args, **kwargs)
        if new is not None:
            self.blocks[row] = self.length[row] // self.block_size
        return new

    def at_block_end(self, rows):
        """Which rows need a new block, or have a full one that the prefix cache does not know."""
        is_full = self.length[rows] // self.block_size > self.blocks[rows]
        return is_full | (self.computed[rows] % self.block_size == 0)

    def is_steady(self):
        """Whether all requests decode, none is about to end, none can join, and the KV cache has
        room."""
        scheduler, running = self.scheduler, self.scheduler.running
        if not self.row or len(self.row) != len(running):
            return False
        is_waited_for = scheduler.waiting or scheduler.kv_holding_waiting
        if is_waited_for and len(running) < scheduler.max_num_active_reqs:
            return False
        if self.running_rows is None:
            self.running_ids = [request.request_id for request in running]
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
        for i in np.flatnonzero(self.at_block_end(rows)):
            self.write_back(rows[i:i + 1])
            new = self.allocate_slots(self.requests[rows[i]], 1, num_lookahead_tokens=0)
            blocks[i] = new.get_block_ids(allow_none=True)
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=list(names), resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
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
