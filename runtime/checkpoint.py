"""The policy's weights under the names of the checkpoint, and on disk."""
import shutil
from concurrent.futures import ThreadPoolExecutor

from runtime import dist, lora

WRITER = ThreadPoolExecutor(1)
pending = None  # the write that is in progress or was the last one


def named_weights(engine):
    """Yields (name, tensor) of every weight under the checkpoint's names, LoRA adapters merged. Collective.

    ZeRO-3 shards are gathered one tensor at a time.
    """
    import deepspeed
    # keep_vars: with their ZeRO-3 attributes. Unlike named_parameters(), it lists a tied lm_head.weight.
    for name, tensor in engine.module.model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            yield from lora.merge_adapter(engine.module.model, name, tensor.detach())


def save(engine, tokenizer, folder):
    """Writes the policy as a Hugging Face folder in the background, for transformers and vLLM. Collective.

    The folder appears whole or not at all: it is written under another name and renamed. Waits for the
    previous write first (each holds a copy of the weights in host memory) and raises its error. Raises
    RuntimeError if a weight is not finite.
    """
    global pending
    wait()
    weights = {}
    for name, w in named_weights(engine):  # all ranks gather
        if not w.isfinite().all():
            raise RuntimeError(f"weights of {name} are not finite: nothing was saved; is --lr too high?")
        weights[name] = w.to("cpu", copy=True)

    def write():
        part = folder.with_name(folder.name + ".part")
        engine.module.model.save_pretrained(part, state_dict=weights)
        tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)

    if dist.rank() == 0:
        pending = WRITER.submit(write)


def wait():
    """Returns when the last save() is on disk; raises what went wrong."""
    global pending
    write, pending = pending, None
    if write:
        write.result()
