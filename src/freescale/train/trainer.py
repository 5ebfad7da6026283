"""The trainer: builds the parts of a run, trains, and evaluates the result. The loop over the steps
is in training_loop.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from freescale.config import RunConfig
from freescale.data.features.store import FeatureStore
from freescale.launch.attempts import AUTO
from freescale.launch.ranks import has_launcher
from freescale.launch.signals import StopSignals
from freescale.pipeline.loss_watch import LossNotFinite
from freescale.pipeline.step_result import StepResult
from freescale.stores.runs import find_checkpoints, find_store, open_run
from freescale.train.build import (
    adopt_choices,
    build_model,
    build_optimizer,
    build_pipeline,
    find_run_vocabulary,
    load_histories,
    prepare_data,
)
from freescale.train.callbacks import Callback, CallbackList
from freescale.train.compile_kernels import compile_kernels
from freescale.train.deltas.publisher import Publisher
from freescale.train.device_figures import DeviceFigures
from freescale.train.export_folder import RunData
from freescale.train.follow import Follower
from freescale.train.metrics_log import MetricsLog
from freescale.train.mlperf_log import MLPerfLog
from freescale.train.position import Position, build_best, count_steps
from freescale.train.resume import begin_or_resume, complete_run, give_up_later, has_snapshot
from freescale.train.run import Run
from freescale.train.run_folder import RunFolder
from freescale.train.run_state import RunState
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.finite_check import NotFinite
from freescale.train.state.snapshots import Snapshots
from freescale.train.trackers import TRACKERS, TensorBoardLog
from freescale.train.training_loop import TrainingLoop, read_batches
from freescale.train.update import check_new_data, keep_origin
from freescale.transport.api import Transport
from freescale.transport.connect import connect
from freescale.transport.failures import run_on_rank_0
from freescale.transport.signs_of_life import name_silent_ranks
from freescale.worker_server import WorkerServer, start_early

_DIVERGED = "lower --lr and --row-lr, or set --clip and --row-clip"


class Trainer:
    """A run in a folder: `Trainer(config).train()`.

    Every rank creates one with the same arguments. The constructor and `train` are collectives. The
    parts are `data`, `model`, `optimizer`, `pipeline` and `checkpoints`.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path | str | None = None,
        *,
        resume: bool | str = False,
        callbacks: Sequence[Callback] = (),
        histories: Path | None = None,
        transport: Transport | None = None,
        worker_server: WorkerServer | None = None,
    ) -> None:
        """Builds the run and, with `resume`, loads a checkpoint from its folder.

        Args:
            config: settings of data, model and training.
            folder: the run's folder. None creates one under runs/ when training begins.
            resume: True continues from the last checkpoint in `folder`, "best" or a step from that
                one; later checkpoints are then renamed to `given-up-*`. "auto" continues if there
                is a checkpoint and starts a new run otherwise.
            callbacks: called at steps, evaluations and checkpoints, on every rank.
            histories: the prepared histories file. None prepares `config.data.data`.
            transport: connects the ranks. None: connect as torchrun's environment variables say, or
                as a single process without them, and close the connection after training.
            worker_server: a server of data workers that is already running; closed after training.
                None starts one if the run needs workers.

        Raises:
            ValueError: if the folder holds another run, there is nothing to resume, or the data,
                the model and the checkpoint do not match.
        """
        self.config = config
        log = config.train.mlperf_log
        self._reports = [] if log is None else [MLPerfLog(log, config)]  # its clock starts here
        # Started first: it starts up while the model is built and kernels are compiled.
        worker_server = worker_server or start_early(config)
        follows = config.data.follow is not None
        if follows and folder is None:
            raise ValueError("--follow needs a folder for the run: it keeps the events there")
        if not follows:
            self.histories = histories or prepare_data(config)
        self._connected = transport is None
        settings = config.train
        if transport is None:
            transport = connect(settings.device, settings.timeout, settings.transport)
        self.transport, every = transport, settings.snapshot_every
        self.snapshots = None if every is None else Snapshots(transport, every)
        remembers = partial(has_snapshot, self.snapshots)
        own = open_run(folder, trains=True) if folder else None
        option = "--deltas" if settings.deltas else "--follow" if follows else None
        if option and own is not None and (store := find_store(own)) is not None:
            raise ValueError(
                f"{option} with {store}: its files are put in place by renames, which stores do "
                "not have; name a folder on a disk"
            )
        self.run_folder = RunFolder(own, resume, transport, remembers)
        with self.run_folder.note_failure(lambda: 0), name_silent_ranks(transport):
            self.follower = None
            if follows:
                folder, again = self.run_folder.path, self.run_folder.resume
                self.follower = Follower(config, folder, transport, again)
                self.follower.wait_for_first()
                self.histories = self.follower.histories
            self._run = self._build(callbacks, worker_server)
            named = isinstance(resume, str) and resume != AUTO
            begin_or_resume(self._run, str(resume) if named else "last")

    def _build(self, callbacks: Sequence[Callback], worker_server: WorkerServer | None) -> Run:
        config, settings, transport = self.config, self.config.train, self.transport
        self.data = load_histories(config, self.histories, transport)
        if self.follower is not None and not self.run_folder.resume:
            self.follower.begin(self.data)
        check_new_data(config, self.data)
        # config.json stores the automatic choices: a resumed run repeats them
        self.config = config = adopt_choices(config, self.data.negatives)
        total = count_steps(self.data, settings.steps)
        self.model = build_model(config, self.data, transport)
        self.optimizer = build_optimizer(config, self.model)
        self.pipeline = build_pipeline(config, self.model, self.optimizer, total)
        self.checkpoints = Checkpoints(
            find_checkpoints(self.folder),
            transport,
            settings.keep_checkpoints,
            full_every=settings.full_every,
            asynchronous=settings.async_checkpoints,
            publishes=settings.deltas is not None,
        )
        self.best = build_best(config)  # evaluation so far; None unless evaluations are compared
        self.position = Position(settings, self.pipeline, self.data, self.best)
        parts = self.checkpoints, self.model, self.optimizer, self.position, self.follower
        self.state = RunState(*parts)
        own: list[Callback] = [MetricsLog(self.run_folder), DeviceFigures(settings.profile_steps)]
        own += [TensorBoardLog()] if settings.tensorboard else []
        own += [TRACKERS[settings.tracker]()] if settings.tracker else []
        self.callbacks = CallbackList([*own, *self._reports, *callbacks], self)
        return Run(
            config,
            self.histories,
            self.run_folder,
            self.state,
            self.snapshots,
            self.callbacks,
            worker_server,
            self.follower,
        )

    # ---- progress

    @property
    def folder(self) -> Path:
        """The run's folder. A default name is final once training has begun."""
        return self.run_folder.path

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def step(self) -> int:
        """Steps completed so far, including those before a resume."""
        return self.position.step

    @property
    def total(self) -> int:
        """The step at which the run ends."""
        return self.position.total

    @property
    def epoch(self) -> int:
        """Complete passes over the data."""
        return self.position.epoch

    @property
    def window(self) -> dict[str, int] | None:
        """In order of time, the window that was evaluated last: its number and times."""
        return self._run.window

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.position.is_complete

    @property
    def notes(self) -> list[str]:
        """Messages for the user about the folder and about what was resumed."""
        return [*self.run_folder.notes, *self.state.notes]

    # ---- training

    def stop(self) -> None:
        """Ends training on all ranks after the same step, at most three steps from now. The run
        then finishes as usual, with a checkpoint and the test evaluation. Any rank may call it."""
        if self.follower is not None:
            self.follower.stop()
        self.pipeline.stop()

    def train(self, signals: StopSignals | None = None) -> dict[str, Any]:
        """Trains for the configured steps, or until `stop`, `patience` or a signal ends training.

        With `keep="best"`, the best checkpoint is loaded into `model` and evaluated on the test
        part.

        Args:
            signals: listens for SIGTERM, SIGUSR1 and Ctrl-C. None installs no signal handlers.

        Returns:
            `loss` of the last step, `test` with the metrics of the test part, `ledger` (on rank 0)
            and `stopped`: the number of the signal that ended the run, or 0. If evaluations are
            compared, `best` with its `metric`, `value`, `step` and whether it is `kept`.

        Raises:
            ValueError: if no step is left to train, or the model diverges.
            RemoteError: if another rank fails.
        """
        with self._hold_folder():
            if self.run_folder.is_auto and self.is_complete:
                results = complete_run(self._run)
            else:
                results = self._train(signals or StopSignals(self.stop, self.rank))
            self.run_folder.note_result(results["stopped"], self.step)
            self.run_folder.upload()
            self._close_snapshots()
        if self._connected:  # after an error the ranks may no longer be in step
            self.transport.close()
        return results

    def iterate(self) -> Iterator[StepResult]:
        """Yields the result of each step, for programs with a loop of their own. Logs, evaluations
        and checkpoints happen when they are due. Unlike `train`, it neither saves a final
        checkpoint nor evaluates the test part. A collective, as is each step."""
        with self._hold_folder():
            loop = self._open(StopSignals(self.stop, self.rank))
            try:
                yield from loop.run()
            except GeneratorExit:  # the program ends its loop
                self.run_folder.note_result(0, self.step)
                if self.snapshots is not None:
                    self.snapshots.abandon(end=True)
                raise
            self._run.complete_checkpoint()
            self.run_folder.note_result(0, self.step)
            self.run_folder.upload()
            self._close_snapshots()

    def evaluate(self, part: str) -> dict[str, dict[str, float]]:
        """Returns the metrics of the current model on the `validation` or `test` part, and calls
        `on_evaluation`. Before training, nothing is recorded in the run. A collective."""
        return self._run.evaluate(part)

    @contextmanager
    def _hold_folder(self) -> Iterator[None]:
        """Releases the folder, the worker server and the snapshots when the block ends, also after
        an exception."""
        try:
            with self.run_folder.note_failure(lambda: self.step), name_silent_ranks(self.transport):
                yield
        finally:
            if self._run.worker_server is not None:
                self._run.worker_server.close()
            if self.follower is not None:
                self.follower.close()
            self.run_folder.close()
            self.checkpoints.close()
            if self.snapshots is not None:  # no effect after `_close_snapshots`
                expected = self.run_folder.is_auto or has_launcher()
                self.snapshots.abandon(end=not expected)

    def _close_snapshots(self) -> None:
        """Closes the snapshots of a run that has ended and is saved."""
        if self.snapshots is not None:
            self.snapshots.close(self.model.tables)

    def _open(self, signals: StopSignals) -> TrainingLoop:
        """Refuses a run without steps left; otherwise prepares the first step and opens the
        folder."""
        self.position.refuse_end(self.folder)
        # Workers start while kernels are compiled.
        batches = read_batches(self._run)
        try:
            self._prepare_steps()
        except BaseException as error:
            batches.__exit__(type(error), error, None)
            raise
        self.callbacks.call("on_start")
        return TrainingLoop(self._run, signals, batches)

    def _prepare_steps(self) -> None:
        compile_kernels(
            self.config,
            self.pipeline.precision,
            self.data.num_actions > 0,
            self.transport.device,
            partial(self.callbacks.call, "on_compile"),
            self.data.features,
        )
        self.pipeline.tune()  # before callbacks describe the run: it makes automatic choices
        if self.run_folder.resume:
            self.run_folder.forget_snapshots()
            give_up_later(self._run)
        vocabulary = find_run_vocabulary(self.histories, self.data.features)
        self.run_folder.open(self.config.to_json(), vocabulary, self._copy_statistics)
        self.run_folder.log_restarts(self.step)
        self.checkpoints.folder = find_checkpoints(self.folder)
        if self.checkpoints.publishes:
            run_on_rank_0(self.transport, self._open_publisher, str(self.folder / "deltas"))
        if self.snapshots is not None:
            assert self.run_folder.run_id is not None
            self.snapshots.open(self.run_folder.run_id, self.step)

    def _open_publisher(self) -> None:
        features = cast("FeatureStore | None", self.data.features)
        data = RunData(self.config, self.folder, self.histories, features)
        publisher = Publisher(self.folder / "deltas", self.config.train.keep_deltas, data)
        publisher.open(self.checkpoints.latest())
        self.checkpoints.publisher = publisher

    def _copy_statistics(self, folder: Path) -> None:
        """What the run's folder keeps of its data, and of the run that it continues."""
        if self.data.features is not None:
            self.data.features.copy_statistics(folder, schema=self.config.data.schema)
        if self.config.origin is not None:
            keep_origin(self.config.origin, folder)

    def _train(self, signals: StopSignals) -> dict[str, Any]:
        loop, last = self._open(signals), None
        results: dict[str, Any] = {}
        try:
            for step in loop.run():
                last = step
            self.callbacks.check()
            signals.lift_limit()
            if last is not None:
                results["loss"] = last.loss
                self._run.save_checkpoint(last=True)
                self.checkpoints.wait_published()
        except LossNotFinite as error:
            raise ValueError(
                f"the loss is {error.loss} at step {error.step}: {_DIVERGED}"
            ) from error
        except NotFinite as error:
            raise ValueError(f"{error}; {_DIVERGED}") from None
        signals.saved = True
        loop.collect()
        results["ledger"] = loop.collector.close(self.transport.device)
        # If any rank received a signal, all ranks skip the evaluation.
        numbers = self.transport.gather_bytes(b"%d" % signals.number)
        results["stopped"] = max(map(int, numbers))
        if self.best is not None:
            results["best"] = self.best.state_dict()
        if not results["stopped"]:
            signals.close()
            if self.config.data.split != "none" and self.follower is None:
                results["test"] = self._run.test()
        self.callbacks.call("on_end", results)
        self.callbacks.check()
        return results
