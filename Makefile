# `make help` lists the targets. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
SWEEP ?= demo
LAUNCHER ?= local
SITE ?= default
RESULTS ?= results
ARGS ?=
TORCH_INDEX ?=
BIN := .venv/bin
PARALLELBENCH := $(BIN)/parallelbench
PYTEST := $(BIN)/python -m pytest --durations=15 --dist worksteal
STAMP := .venv/.installed
INSTALL = @$(PYTHON) launch/installation.py $(@D)

.PHONY: help install demo sweep report notebook debug test test-all test-slurm lint gpu-check bench mutants site
.PRECIOUS: .venv-%/.installed

help:  ## this list
	@sed -nE 's/^([a-z%-]+):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into .venv; torch brings CUDA along (several GB), so the first time takes a minute or more."
	$(INSTALL) --takes-gb 7 --cuda 13 $(addprefix --extra-index-url ,$(TORCH_INDEX)) --constraint constraints.txt --editable '.[dev]'

install: $(STAMP)  ## only install into .venv, e.g. on a login node

.venv-export/.installed .venv-site/.installed: constraints.txt

.venv-%/.installed: environments/%.txt
	$(INSTALL) --takes-gb $$(sed -n '1s/^# \([0-9.]*\) GB.*/\1/p' $<) --sees . --requirement $<

venv-%: .venv-%/.installed  ## an environment beside it: venv-tensorflow, venv-tensorflow-gpu, venv-velox, venv-export, venv-site
	@:

demo: $(STAMP)  ## a small comparison on real images, and its report (3 to 5 minutes)
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

test: $(STAMP)  ## the test suite, but for what needs a Slurm cluster; options of pytest in ARGS=…
	$(PYTEST) -n 2 -m 'not slurm and not exhaustive' $(ARGS)

test-all: $(STAMP)  ## the same with every case of every test
	$(PYTEST) -n 2 -m 'not slurm' $(ARGS)

test-slurm: $(STAMP)  ## tests on real Slurm clusters that are started here (needs root; installs Debian's Slurm)
	$(BIN)/python -m tests.slurm.packages
	$(PYTEST) -n 3 -m slurm tests/slurm $(ARGS)

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-check:  ## what only a GPU can show (needs no installation but for whole runs); in a job with LAUNCHER=slurm SITE=… ARGS=nodes=2
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m \
		$(if $(filter slurm,$(LAUNCHER)),parallelbench.entry launch.slurm.errands gpu-check site=$(SITE) results=$(RESULTS),parallelbench.gpu_check) $(ARGS)

bench: $(STAMP)  ## paired benchmarks of the suite itself; writes docs/benchmarks.md
	$(BIN)/python -m tests.bench

mutants: $(STAMP)  ## which tests see a wrong number: 30 small changes of the source, each tried (hours on two cores)
	$(BIN)/python -m tests.mutants $(ARGS)

site: $(STAMP) .venv-site/.installed  ## docs/ as a site in .site/; a link or an anchor that leads nowhere ends it
	$(BIN)/python -m tests.docs  # the reference
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --clean
