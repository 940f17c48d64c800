"""What comes from the Hugging Face hub, and errors in one line. Importing this is quick."""
import functools
import os
import re
from textwrap import shorten


@functools.cache
def hub_answers():
    """Whether the Hugging Face hub answers within 3 s. If not, its libraries use their local cache
    from now on: each of them would try again and again, for half a minute and a dozen lines."""
    from huggingface_hub import constants, get_session
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=3)
        except Exception:  # any of them means "not reached"
            constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
    return not constants.HF_HUB_OFFLINE


def first_line(error, name=""):
    """An error in one line. `name`: the model or data set that the hub was asked for."""
    if name and not hub_answers():
        return f"the hub is offline or not reachable, and {name} is not in the local cache"
    return shorten(f"{type(error).__name__}: {error}", 500, placeholder=" ...")


_empty_models = {}


def empty_model(model, trust_remote_code=False):
    """The model of a folder or hub id on the meta device: modules and shapes, no weights. The first
    call, in flags.py, decides whether code that comes with the model may run."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
    if model not in _empty_models:
        code = {"trust_remote_code": trust_remote_code}
        about = str(PretrainedConfig.get_config_dict(model))
        if many := re.search(r"'\w*layers?': \d[\d.e+]{3,}", about):  # they would take minutes
            raise ValueError(f"{many[0]} is not below 1000")
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(model, **code)
            _empty_models[model] = AutoModelForCausalLM.from_config(config, **code)
    return _empty_models[model]
