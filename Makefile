# The two commands: `make demo` and `make test`. Each sets up what it needs, in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# The tests start hundreds of processes: without it, each compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: ready demo test test-integration test-torchrec test-versions browser compiler lint wheel docs bench clean

# The environment alone.
ready: $(READY)

# A model on two ranks, then serial against all techniques; under two minutes once installed.
demo: $(READY)
	$(VENV)/bin/freescale demo --nproc 2

# Four at a time: most tests wait, for processes of their own or for a timeout.
test: $(READY) browser compiler
	$(RUN) -m pytest -n 4 --dist worksteal

# Against the real software: Slurm, Ray, Kubernetes' schemas, MLflow, Weights & Biases, Optuna, DuckDB, Spark, S3. About 15 minutes.
test-integration: $(VENV)-integration/.ready compiler
	$(VENV)-integration/bin/python -m pytest tests/integration

# An environment of its own on top of .venv: what these packages bring is no concern of the other tests.
$(VENV)-integration/.ready: $(READY) tests/integration/requirements.txt
	@{ command -v slurmctld && command -v java; } >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
		--no-install-recommends slurm-wlm munge iproute2 default-jre-headless >/dev/null; } || echo "no Slurm or Java: tests are skipped"
	$(RUN) -m venv --clear $(VENV)-integration
	$(RUN) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
		$$($(VENV)-integration/bin/python -c 'import site; print(site.getsitepackages()[0])')/freescale.pth
	$(VENV)-integration/bin/python -m pip install --quiet --disable-pip-version-check -r tests/integration/requirements.txt
	touch $@

# The tests of freescale.torchrec. TorchRec gets an environment of its own on top of .venv: benchmarks that `make test` runs would take
# longer with it.
test-torchrec: $(VENV)-torchrec/.ready
	$(VENV)-torchrec/bin/python -m pytest tests/unit/test_torchrec.py tests/unit/test_torchrec_fused.py \
		tests/unit/test_torchrec_checkpoint.py tests/unit/test_bench_torchrec.py

# torchrec declares fbgemm-gpu, which has no CPU wheel, hence --no-deps; other fbgemm versions do not load with this torch.
$(VENV)-torchrec/.ready: $(READY)
	$(RUN) -m venv --clear $(VENV)-torchrec
	$(RUN) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
		$$($(VENV)-torchrec/bin/python -c 'import site; print(site.getsitepackages()[0])')/freescale.pth
	$(VENV)-torchrec/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 \
		tensordict torchmetrics==1.0.3 lightning-utilities tqdm pyre-extensions typing-inspect cloudpickle importlib-metadata zipp orjson pyvers
	touch $@

# The oldest and the newest versions that are supported, in environments of their own; .ci/versions has the options.
test-versions: compiler
	bash .ci/versions

# The report's tests drive Chromium. Where it cannot be installed they fail and say what to do; FREESCALE_NO_BROWSER=1 skips them.
browser:
	@command -v chromedriver >/dev/null || test -n "$$FREESCALE_NO_BROWSER" || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		chromium chromium-driver fonts-dejavu-core >/dev/null; } || echo "no browser: the report's tests will fail"

# The engine's tests compile it, and run it with gcc's sanitizers.
compiler:
	@{ gcc -print-file-name=libasan.so 2>/dev/null | grep -q / && command -v g++ >/dev/null; } || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		gcc g++ libc6-dev >/dev/null; } || echo "no gcc: the engine's tests will fail"

lint: $(READY)
	$(VENV)/bin/ruff check src tests benchmarks examples docs/hooks.py docs/defaults.py
	$(VENV)/bin/ruff format --check src tests benchmarks examples docs/hooks.py docs/defaults.py
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The wheel, installed elsewhere, runs the demo, a training, eval, a report, an export, recommendations and a simulation.
wheel: $(READY)
	bash .ci/wheel $(RUN)

# The documentation site, in site/: opens from disk; its search needs a server (`python3 -m http.server -d site`). Broken links and anchors are errors.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "built: site/index.html"

$(VENV)/.docs: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# The comparison with TorchRec, about 10 minutes; sets up an environment of its own. Without root its ranks talk over loopback, not a slow network.
bench: $(READY)
	$(VENV)/bin/freescale bench ladder

$(READY): pyproject.toml benchmarks/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./benchmarks
	touch $(READY)

clean:
	rm -rf $(VENV) $(VENV)-torchrec .venv-oldest .venv-newest .venv-newest-torchrec .venv-peer runs site .pytest_cache .mypy_cache .ruff_cache
