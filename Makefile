# The same commands at home and in CI. A virtual environment in .venv is made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
DOCS_STAMP := $(VENV)/.installed-docs

RELEASE := build/release

.PHONY: help demo test cuda-truth torch-versions test-machines faults faults-long fuzz golden soak long slow check fix docs docs-serve site site-of-docs release-check audit pins clean
help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	@touch $@

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(DEMO_STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

demo: $(DEMO_STAMP) ## plan, train a small GPT on the built-in corpus, compare, report: about three minutes
	@trap : INT; $(BIN)/foretrain demo || { code=$$?; [ $$code -eq 75 ] && \
		echo "Stopped, nothing is lost. Go on with: $(BIN)/foretrain demo --resume auto" || exit $$code; }

test: $(STAMP) ## the test suite on the CPU, but for the long tests: four minutes on two cores
	$(BIN)/python -m pytest

cuda-truth: $(STAMP) ## predictions against PyTorch's real CUDA build, without a card (6 GB, 45 minutes; TIER=large for more, TIER=finetuning for Trainer, TIER=ranks for two cards)
	$(BIN)/python -m tests.cuda_build$(if $(filter finetuning ranks,$(TIER)),.$(TIER),$(if $(TIER), --tier $(TIER))) $(if $(ONLY),--only "$(ONLY)")

torch-versions: $(STAMP) ## the tests of traces with the torch of other environments: PYTHONS="~/envs/a ~/envs/b"
	$(BIN)/python -m tests.torch_versions $(PYTHONS)

test-machines: $(STAMP) ## the suite on four made-up machines, on one core, and next to eight busy processes
	$(BIN)/python -m tests.machines

faults: $(STAMP) ## inject hundreds of faults into runs: kills, signals, full disks, flipped bits, NaN (ten minutes)
	$(BIN)/python -m tests.faults --tier pr

faults-long: $(STAMP) ## the same with thousands
	$(BIN)/python -m tests.faults --tier nightly

fuzz: $(STAMP) ## damaged files for every reader of foreign files: MINUTES=5 SEED=1 (ONLY="log tokenizer"; COVERAGE=1 with atheris)
	$(BIN)/python -m tests.faults.fuzz --minutes $(or $(MINUTES),5) --seed $(or $(SEED),1) $(if $(ONLY),--only $(ONLY)) $(if $(COVERAGE),--coverage)

golden: $(STAMP) ## every answer of this tree against those of a commit: BASE=main (eight minutes; QUICK=1 for a fifth)
	$(BIN)/python -m tests.golden $(or $(BASE),HEAD) $(if $(QUICK),--quick) $(if $(ONLY),--only "$(ONLY)")

soak: $(STAMP) ## a run of one hour with a fault every 30 seconds, then the same steps without faults
	rm -rf soak && $(BIN)/python -m tests.faults.soak --hours 1 --every 30

long: $(STAMP) ## the long tests of the suite, which CI runs too: ten minutes on two cores
	$(BIN)/python -m pytest -m "long and not slow and not gpu"

slow: $(STAMP) ## the slower proofs, before a release: two hours
	$(BIN)/python -m pytest -m slow

check: $(STAMP) ## lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

fix: $(STAMP) ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_STAMP) ## regenerate the generated parts of README.md and docs/, and build the site in build/docs/site
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/build_site.py

site-of-docs: $(DOCS_STAMP) # what CI runs: the generated parts are current, and the site is built
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/build_site.py

docs-serve: $(DOCS_STAMP) ## the documentation site on 127.0.0.1:8000, rebuilt at each change
	$(BIN)/python docs/build_site.py --serve

site: | $(BIN)/python ## build/planner: the planner as a static site for any host (needs node and npm)
	$(BIN)/python static_site/build.py

$(RELEASE)/.installed: release/requirements.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --require-hashes --requirement release/requirements.txt
	@touch $@

release-check: $(RELEASE)/.installed ## build twice and compare, check the metadata, list what it brings, run it where nothing is (TRAIN=1: with torch)
	$(RELEASE)/bin/python release/reproducible.py --out dist
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(RELEASE)/bin/python release/sbom.py dist --out build/foretrain.cdx.json
	$(PYTHON) release/empty_root.py dist $(if $(TRAIN),--train)

audit: $(RELEASE)/.installed ## known vulnerabilities of what is installed, and the workflows
	$(RELEASE)/bin/python -m pip_audit .
	$(RELEASE)/bin/zizmor --offline .github action.yml

pins: ## the versions and hashes that the action and a release install; needs uv and Python 3.13's packages
	@for group in build release; do out=release/requirements.txt; project=; \
		[ $$group = release ] || { out=release/action-requirements.txt; project=pyproject.toml; }; \
		{ echo '# Written by `make pins`; installed with --require-hashes.'; uv pip compile --quiet --universal --python-version 3.13 \
		--generate-hashes --no-header --no-annotate $$project --group pyproject.toml:$$group; } > $$out || exit 1; done

clean: ## remove what the commands made
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
