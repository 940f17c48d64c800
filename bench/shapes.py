"""How fast a GPU is at each product of a model, at attention and at a token step, by shape.

    python -m bench.shapes                              products and attention of Qwen2.5-1.5B
    python -m bench.shapes tiny                         a small shape, also on a CPU
    python -m bench.shapes qwen2.5-1.5b --decode FOLDER   vLLM's token steps with this model

A large square product shows what the card can do (bench/roofline.py). The products of a training
step are not square: this table shows which of them stay below that rate. A product of T tokens has
three forms: forward (T, in) x (in, out), the gradient of its input, the gradient of its weights.
"""
import torch

import nano_rlvr as nr
from bench import common, roofline
from bench.random_model import SHAPES
from runtime import batch, ranks
from runtime.messages import first_line

TOKENS = (7744, 7745, 8192, 14550, 16384)  # of a pack
SEQUENCES = (1, 8, 64, 256, 512)  # that vLLM decodes at the same time
STEPS = 64  # token steps of a measurement


def milliseconds(work, trials=6):
    """The time of the fastest of several calls, in ms. The first one is a warm-up."""
    return 1e3 * roofline.least_seconds(work, trials)


def matrices(size):
    """{name: (numbers in, numbers out)} of a layer's matrices and of a chunk of the LM head."""
    hidden = size["hidden_size"]
    mlp = size["intermediate_size"]
    kv = size["num_key_value_heads"] * head_size(size)
    return {
        "q, o": (hidden, hidden),
        "k, v": (hidden, kv),
        "q, k, v joined": (hidden, hidden + 2 * kv),
        "gate, up": (hidden, mlp),
        "gate, up joined": (hidden, 2 * mlp),
        "down": (mlp, hidden),
        "head, 8,192 words": (hidden, 8192),
    }


def head_size(size):
    return size["hidden_size"] // size["num_attention_heads"]


def product_row(name, tokens, numbers_in, numbers_out, place):
    """A row of the table: TFLOP/s of the three forms of one product."""
    x = torch.randn(tokens, numbers_in, **place)  # (T, in)
    weight = torch.randn(numbers_out, numbers_in, **place)  # (out, in)
    grad = torch.randn(tokens, numbers_out, **place)  # (T, out)
    forms = (
        lambda: x @ weight.T,  # (T, out)
        lambda: grad @ weight,  # (T, in)
        lambda: grad.T @ x,  # (out, in)
    )
    flops = 2 * tokens * numbers_in * numbers_out
    rates = [flops / milliseconds(form) / 1e9 for form in forms]  # 1e3 ms, 1e12 FLOP
    return [name, tokens, *(f"{rate:.4g}" for rate in rates)]


def made_up_pack(tokens):
    """A batch of about that many tokens: groups of 8 completions, their lengths from short to long,
    that share a prompt of 100 tokens."""
    rollouts = []
    total = 0
    while total < tokens:
        prompt = [len(rollouts)] * 100
        for i in range(8):
            length = max(1, tokens // 36 * (i + 1))
            rollouts.append(batch.Rollout(prompt, [2] * length, "", False, [0.0] * length))
            total += length
    return batch.collate(rollouts)


def flash_attention_4(q, k, v, pack, scaling):
    """The kernel in vLLM's wheel: (T, heads, d), (K, kv heads, d) twice -> (T, heads, d)."""
    from vllm.vllm_flash_attn.cute.interface import flash_attn_varlen_func
    out, *_ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=pack.cu_seqlens_q, cu_seqlens_k=pack.cu_seqlens_k,
        max_seqlen_q=pack.max_seqlen, max_seqlen_k=pack.max_seqlen, softmax_scale=scaling,
        causal=True)
    return out  # (T, heads, d)


def attention_rows(size, tokens, place):
    """Rows: kernel, ms forward, ms forward and backward, relative distance to the first kernel of
    output and gradients. A kernel that fails has its error instead."""
    pack = made_up_pack(tokens)
    T = pack.input_ids.shape[1]
    K = len(pack.kv_index)
    heads = size["num_attention_heads"]
    d = head_size(size)
    generator = torch.Generator(place["device"]).manual_seed(0)

    def random(length, heads):
        return torch.randn(length, heads, d, generator=generator, **place)

    inputs = [random(T, heads)]  # (T, heads, d)
    inputs += [random(K, size["num_key_value_heads"]) for _ in range(2)]  # (K, kv heads, d) twice
    grad = random(T, heads)  # (T, heads, d)
    kernels = {"the trainer's": batch.attend_in_groups}
    if torch.cuda.is_available():
        kernels = {"the trainer's": batch.flash_attention, "FlashAttention-4": flash_attention_4}
    rows = []
    first = None
    for name, kernel in kernels.items():
        leaves = [x.detach().requires_grad_() for x in inputs]  # (T, ...), (K, ...), (K, ...)

        def both():
            out = kernel(*leaves, pack, d**-0.5)  # (T, heads, d)
            return out, *torch.autograd.grad(out, leaves, grad)

        try:
            results = torch.cat([x.detach().flatten() for x in both()]).float()  # (all numbers,)
            forward = milliseconds(lambda: kernel(*inputs, pack, d**-0.5))
            everything = milliseconds(both)
        except Exception as e:  # a kernel may not exist for this card or this version
            rows.append([name, "failed", first_line(e)[:100], ""])
            continue
        first = results if first is None else first
        distance = (results - first).norm() / first.norm()
        rows.append([name, f"{forward:.2f}", f"{everything:.2f}", f"{distance:.1e}"])
    return rows


def decode_rows(folder, most):
    """Rows: sequences at the same time, ms of a token step. The model has prompts of one token."""
    cfg = nr.parse_config(["--model", folder, "--max_prompt", "64", "--max_tokens", "256",
                           "--template", "none", "--gpu_memory_utilization", "0.5"])
    ranks.init_process_group(cfg.timeout)
    llm = nr.Sampler(cfg)
    rows = []
    for n in SEQUENCES:
        if n > most:
            continue
        prompts = [[5 + i] for i in range(n)]

        def steps(count):
            nr.rollout(llm, prompts, 1, 1.0, count, range(n), ignore_eos=True)

        # the difference leaves out what happens once per request
        spent = milliseconds(lambda: steps(2 * STEPS), 3) - milliseconds(lambda: steps(STEPS), 3)
        rows.append([n, f"{spent / STEPS:.3f}"])
    return rows


def main():
    parser = common.parser(__doc__)
    parser.add_argument("shape", nargs="?", default="qwen2.5-1.5b", choices=SHAPES)
    parser.add_argument("--decode", metavar="FOLDER", help="a model for vLLM's token steps")
    args = parser.parse_args()
    is_small = args.shape != "qwen2.5-1.5b"
    if args.decode:
        rows = decode_rows(args.decode, 64 if is_small else max(SEQUENCES))
        return print(common.table(["sequences", "ms per token step"], rows))
    size = SHAPES[args.shape]
    has_cuda = torch.cuda.is_available()
    place = {"device": ranks.device(), "dtype": torch.bfloat16 if has_cuda else torch.float32}
    rows = []
    for tokens in TOKENS[:1] if is_small else TOKENS:
        for name, numbers in matrices(size).items():
            rows.append(product_row(name, tokens, *numbers, place))
    head = ["product", "tokens", "forward", "gradient of the input", "gradient of the weights"]
    print("TFLOP/s:\n\n" + common.table(head, rows))
    head = ["attention", "ms forward", "ms forward and backward", "distance to the first"]
    tokens = TOKENS[0] // 8 if is_small else TOKENS[0]
    print("\n" + common.table(head, attention_rows(size, tokens, place)))


if __name__ == "__main__":
    main()
