"""The proof of a sync: checksums of the trainer's weights and of those that vLLM has.

Log-probs do not show a missed sync at a small learning rate, which changes them by less than bf16
noise. So the checksums of all weights that are not repacked for a kernel are compared after a sync.
"""
from collections import defaultdict
from types import SimpleNamespace

import torch

from runtime import ranks
from runtime.messages import RunError

CHUNK = 2**21  # elements that checksum() hashes at a time: three temporaries of 16 MB
FACTORS = (0x5851F42D4C957F2D, 0x2545F4914F6CDD1D)  # odd; of Knuth's MMIX generator and xorshift64*
EXPERTS = ".experts."  # of MoE layers: not compared, as vLLM's layout depends on the kernel


@torch.no_grad()
def checksum(tensor):
    """Sum of a 64-bit hash of the bits of each element, modulo 2^64: () int64.

    Any change of bits changes it, but for a chance of about 2^-64. The order of elements changes
    nothing: a fused tensor has its parts' sum. A wrong order inside a module is left to
    the comparison of log-probs."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.reshape(-1).split(CHUNK):
        x = part.view(getattr(torch, f"int{8 * part.element_size()}")).long() + 1  # so a 0 counts
        for factor in FACTORS:
            x *= factor
            x ^= x >> 32 & 2**32 - 1  # the upper half; without it two equal changes could cancel
        total += x.sum()
    return total


def as_kept(name, tensor):
    """A tensor as vLLM's Mamba layers keep it: of A_log they have A = -exp(A_log), in float32."""
    return -tensor.float().exp() if name.endswith(".A_log") else tensor  # () to the shape of A_log


class SentWeights:
    """An iterable of the trainer's (name, tensor) pairs that keeps a checksum of each tensor.
    All in one pass: ZeRO-3 gathers a tensor only for the moment in which vLLM takes it."""

    def __init__(self, named_weights):
        self.named_weights = named_weights
        self.sent = {}  # name -> elements, dtype, checksum
        self.left_out = ()  # names that vLLM does not have if they are tied

    def __iter__(self):
        for name, tensor in self.named_weights:
            tensor = tensor.to(ranks.device())  # LoRA with offload: frozen weights are on the host
            kept = as_kept(name, tensor)  # the shape of the tensor
            weight = SimpleNamespace(
                elements=kept.numel(), dtype=kept.dtype, checksum=checksum(kept).item())
            if name in self.left_out and weight in self.sent.values():
                continue  # a tied head: the embedding, which has been sent, is the same
            self.sent[name] = weight
            yield name, tensor

    def check(self, llm):
        """Raises RunError if vLLM's weights are not those handed out; prints what it cannot see."""
        for held in llm.apply_model(lambda model: vllm_checksums(model, self.sent)):
            if problem := compare(held, self.sent):
                raise RunError(
                    f"after the sync vLLM on rank {ranks.rank()} does not have the trainer's "
                    f"weights: {problem}. Do not trust this engine or what it samples.")


def vllm_checksums(model, sent):
    """What this rank's vLLM has: {parameter: (names of its parts in `sent`, elements, checksum)}.

    The parts are those of a fused parameter, or itself; none if one of them was not sent. If a
    kernel has repacked it: 0 elements."""
    held = {}
    sources = defaultdict(list)  # name in vLLM -> names in `sent`
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # of a family with other names there
    for name in sent:
        own_name = mapper and mapper.map_name(name) or name  # None: vLLM leaves the tensor out
        sources[own_name.replace(".A_log", ".A")].append(name)
    fused = getattr(model, "packed_modules_mapping", {})  # "qkv_proj": ["q_proj", "k_proj", ...]
    for name, parameter in model.named_parameters():  # each storage once
        if EXPERTS in name:
            continue
        path, _, suffix = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        names = [name.replace(".A_log", ".A")]
        if names[0] not in sources:
            names = [f"{parent}.{part}.{suffix}" for part in fused.get(last, ())]
        if not names or not set(names) <= sources.keys():
            held[name] = [], 0, 0
            continue
        parts = sum((sources[part] for part in names), [])
        if indices := getattr(model.get_submodule(path), "shard_indices", None):
            parameter = parameter[:indices.num_org_elements]  # the rows after it are padding
        # in the trainer's type: exact if vLLM's is the same or wider
        parameter = as_kept(name, parameter.to(sent[parts[0]].dtype))
        held[name] = parts, parameter.numel(), checksum(parameter).item()
    return held


def compare(held, sent):
    """What is wrong with vLLM's weights, in one line, or "". A parameter must have its parts' sum.
    held: see vllm_checksums."""
    wrong = []
    seen = set()  # names of parts in `held`
    visible = set()  # those that are compared
    for name, (parts, elements, total) in held.items():
        seen |= set(parts)
        if parts and not elements:  # repacked
            continue
        elements_sent = sum(sent[part].elements for part in parts)
        total_sent = sum(sent[part].checksum for part in parts)
        if not parts or elements != elements_sent or (total - total_sent) % 2**64:
            wrong.append(name)  # also if it was not sent
        visible |= set(parts)
    known = {(sent[name].elements, sent[name].checksum) for name in visible}
    repacked = seen - visible
    hidden = 0  # elements
    for name, weight in sent.items():
        if EXPERTS in name or name in repacked:
            hidden += weight.elements
        elif name not in seen and (weight.elements, weight.checksum) not in known:
            wrong.append(name)  # a tied weight, which is sent twice, is known
    if wrong:
        return (f"{', '.join(wrong[:3])} differ or are missing ({len(wrong)} in all; "
                f"{len(visible)} tensors were compared)")
    compared = sum(sent[name].elements for name in visible)
    if hidden:
        ranks.print_each_once(
            f"note: checksums see {compared:,} of {compared + hidden:,} weights of vLLM on this "
            "device, log-probs check the others (normal on a CPU)")
    return ""
