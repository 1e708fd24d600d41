# `make help` lists the targets. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
SWEEP ?= demo
LAUNCHER ?= local
SITE ?= default
RESULTS ?= results
ARGS ?=
BIN := .venv/bin
PARALLELBENCH := $(BIN)/parallelbench
STAMP := .venv/.installed

TENSORFLOW := .venv-tensorflow

.PHONY: help install tensorflow demo sweep report notebook debug twins test test-all test-slurm test-tensorflow test-velox velox test-export cluster-up cluster-down lint check gpu-check bench advise docs site format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

INSTALL = @$(PYTHON) launch/installation.py $(@D)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into .venv; torch brings CUDA along (several GB), so the first time takes a minute or more."
	$(INSTALL) --takes-gb 7 --constraint constraints.txt --editable '.[dev]'

$(TENSORFLOW)/.installed: constraints-tensorflow.txt
	$(INSTALL) --takes-gb 2 --sees . --constraint $< tensorflow-cpu msgspec PyYAML psutil nvidia-ml-py scikit-learn

tensorflow: $(TENSORFLOW)/.installed  ## TensorFlow's environment beside torch's, for strategy=tf_… (processors; about 2 GB)

install: $(STAMP)  ## only install into .venv, e.g. on a login node

.venv-velox/.installed: constraints-velox.txt
	$(INSTALL) --takes-gb 1 --requirement $<

velox: .venv-velox/.installed  ## the environment of preprocess.engine=velox (about 600 MB, half a minute)

demo: $(STAMP)  ## a small comparison on real images, and its report (under 3 minutes)
	$(PARALLELBENCH) submit sweep=demo launcher.pack=true results=$(RESULTS) $(ARGS)  # most of a run would be its start
	$(PARALLELBENCH) report $(RESULTS)/demo

sweep: $(STAMP)  ## run what is missing of SWEEP=… with LAUNCHER=… at SITE=…; more overrides in ARGS=…
	$(PARALLELBENCH) submit sweep=$(SWEEP) launcher=$(LAUNCHER) site=$(SITE) results=$(RESULTS) $(ARGS)

report: $(STAMP)  ## figures, tables and page of SWEEP=…
	$(PARALLELBENCH) report $(RESULTS)/$(SWEEP)

notebook: $(STAMP)  ## the quick look at the last results, in JupyterLab (installed on first use)
	@$(BIN)/python -c 'import jupyterlab' 2>/dev/null || \
		$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[notebook]'
	@mkdir -p $(RESULTS)/notebooks && cp -n analysis/notebooks/*.ipynb $(RESULTS)/notebooks/  # JupyterLab saves by itself
	PARALLELBENCH_RESULTS=$(abspath $(RESULTS)) $(BIN)/jupyter lab $(RESULTS)/notebooks/quick_look.ipynb $(ARGS)

debug: $(STAMP)  ## five deterministic steps in this process, where breakpoint() works; overrides in ARGS=…
	rm -rf .debug
	$(PARALLELBENCH) run measure=debug launcher=inline epochs=1 results=.debug $(ARGS)

test: $(STAMP)  ## the test suite, but for what needs a Slurm cluster
	$(BIN)/python -m pytest -m 'not slurm and not exhaustive' -n 2 --dist worksteal --durations=15

test-all: $(STAMP)  ## the same with every case of every test
	$(BIN)/python -m pytest -m 'not slurm' -n 2 --dist worksteal --durations=15

test-slurm: $(STAMP)  ## tests on real Slurm clusters that are started here (needs root; installs Debian's Slurm)
	$(BIN)/python -m pytest -m slurm -rs --durations=15 -n 3 --dist worksteal tests/slurm

test-velox: $(STAMP) velox  ## tests of preprocess.engine=velox, in its own environment
	$(BIN)/python -m pytest -m velox -rs --durations=5 tests/preprocess

.venv-export/.installed: pyproject.toml constraints.txt $(STAMP)
	$(INSTALL) --takes-gb 0.5 --sees .venv/lib/python3*/site-packages --constraint constraints.txt mlflow-skinny wandb tensorboard

test-export: .venv-export/.installed  ## tests of `parallelbench export`, in an environment with all three programs (about 400 MB)
	.venv-export/bin/python -m pytest -rs tests/analysis/test_export.py

test-tensorflow: $(STAMP) tensorflow  ## tests of strategy=tf_…, in TensorFlow's own environment
	$(BIN)/python -m pytest -m tensorflow -rs --durations=5 -n 2 --dist worksteal tests/tensorflow

cluster-up: $(STAMP)  ## a throwaway Slurm cluster on this machine, to try LAUNCHER=slurm with (needs root)
	$(BIN)/python -m tests.slurm.cluster up $(ARGS)

cluster-down: $(STAMP)  ## end it
	$(BIN)/python -m tests.slurm.cluster down $(ARGS)

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint  ## lint, types, import rules and the fast tests
	$(BIN)/python -m pytest -m 'not slow and not slurm' -n 2 --dist worksteal

ADVICE := $(RESULTS)/advice
advise: $(STAMP)  ## calibrate this machine, advise, measure what is proposed, show the error of what was said (under 10 minutes)
	$(PARALLELBENCH) calibrate results=$(ADVICE) --out $(ADVICE)/calibration.parquet
	$(PARALLELBENCH) advise model=cnn_large data=digits devices=1,2 results=$(ADVICE) --from $(ADVICE)/calibration.parquet --loop 1 --budget 0.3h $(ARGS)
	$(PARALLELBENCH) advise model=cnn_large data=digits devices=1,2,1024 batch_size=8192 --from $(ADVICE)/calibration.parquet --from $(ADVICE)/next_runs
	$(PARALLELBENCH) advise model=gpt batch_size=1024 site=a100_80gb devices=1,2,1024

twins: $(STAMP) tensorflow velox  ## before a release: the small twin of each published sweep, its report and its claims (over two hours on two quiet cores: docs/experiments.md)
	@for sweep in $(notdir $(basename $(wildcard conf/sweep/*_small.yaml))); do \
		echo "== $$sweep" && $(PARALLELBENCH) submit sweep=$$sweep results=$(RESULTS) $(ARGS) && \
		$(PARALLELBENCH) report $(RESULTS)/$$sweep && $(PARALLELBENCH) claims $(RESULTS)/$$sweep || exit 1; done

gpu-check:  ## what only a GPU can show (needs no installation but for whole runs); in a job with LAUNCHER=slurm SITE=… ARGS=nodes=2
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m \
		$(if $(filter slurm,$(LAUNCHER)),parallelbench.entry launch.slurm.errands gpu-check site=$(SITE) results=$(RESULTS),parallelbench.gpu_check) $(ARGS)

bench: $(STAMP)  ## paired benchmarks of the suite itself; writes docs/benchmarks.md
	$(BIN)/python -m tests.bench

docs: $(STAMP)  ## regenerate the parts of docs/ that follow from the code
	$(BIN)/python -m tests.docs

.venv-site/.installed: constraints.txt
	$(INSTALL) --takes-gb 0.2 --constraint $< mkdocs-material

site: .venv-site/.installed  ## docs/ as a site in .site/; a link or an anchor that leads nowhere ends it
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --clean

format: $(STAMP)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what building and testing left behind, but no results
	rm -rf build dist .site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
