"""One rank's run with TensorFlow, from start to end, in the order in which it happens. Loads no torch."""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from parallelbench.frameworks.control_group import PatienceError, Watchdog
from parallelbench.frameworks.tensorflow.twins import BUFFERS
from parallelbench.frameworks.tensorflow.world import TensorFlowWorld
from parallelbench.loaders.order import endless
from parallelbench.measure.memory import release
from parallelbench.training.checks.comparability import CLOSING_STEPS
from parallelbench.training.checks.parity import ComparedStep, as_checked, checks_parity, gathered, parity_rows
from parallelbench.training.exchange import Exchange
from parallelbench.training.failure import give_up
from parallelbench.training.session import RankSession, require_one_type

if TYPE_CHECKING:
    from parallelbench.config.components import Arrays
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.clock import StartUp
    from parallelbench.results.attempt import Attempt
    from parallelbench.results.journal import Journal
    from parallelbench.training.exchange import State


class TensorFlowSession(RankSession):
    """One rank's devices, data, model and journal during a run."""

    _world: TensorFlowWorld

    def __init__(
        self, run: RunConfig, attempt: Attempt, *, device_type: str, journal: Journal, startup: StartUp
    ) -> None:
        super().__init__(run, attempt, journal=journal, startup=startup)
        self._exchange = Exchange.of(attempt)
        if run.measure.deterministic:
            tf.keras.utils.set_random_seed(run.effective_seed)
            tf.config.experimental.enable_op_determinism()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        self._startup.done("imports")
        world = TensorFlowWorld(run, device_type)
        timeout_s = run.launcher.collective_timeout_s
        late = PatienceError(f"TensorFlow did not come back within {timeout_s:g} s")
        if world.size > 1:
            world.patience = Watchdog(timeout_s, lambda: give_up(attempt, world.rank, late))
        world.distribution = run.strategy.connect(run, world)  # type: ignore[attr-defined]
        require_one_type(world)
        self._startup.done("process_group")
        self._join(world)

    def train(self) -> None:
        """Check parity, then train, or resume where an earlier attempt stopped; results go to the journal."""
        run = self._run
        resumed = self._resume()
        if resumed is None:
            self._record_environment()
        arrays = self._arrays()
        self._startup.done("data")
        self._record_data(arrays, resumed)
        parity_passed = self._check_parity(arrays) if resumed is None and checks_parity(run) else None
        self._phase("model")
        initial = self._exchange.read("initial")
        if resumed is None:
            self._describe(_parameters(initial), parity_passed)
            self._facts(**{name: value.item() for name, value in self._exchange.read("facts").items()})
        else:  # the columns of earlier attempts stay
            parity_passed = resumed.facts.get("parity_passed")
            self._record_warnings(resumed_after=resumed.again())
        replica = run.strategy.prepare(initial, run, self._world)  # type: ignore[arg-type]
        self._startup.done("model")
        feed = run.strategy.feed(arrays, run, self._exchange, self._world)  # type: ignore[attr-defined]
        release()
        self._startup.done("data")
        if resumed is not None:
            resumed.restore(replica)
        if getattr(run.strategy, "trace", "") == "startup":
            self._phase("trace")
            replica.warm_up(feed)  # type: ignore[attr-defined]
            self._startup.done("compile")
        trainer = self._trainer(replica, feed)
        if trainer.train(first=1 if resumed is None else resumed.epoch + 1):
            self._finished(parity_passed)
            if run.measure.parity:
                self._close(replica, feed, evaluated=trainer.evaluated)
        replica.close()

    def _check_parity(self, arrays: Arrays) -> bool:
        """Compare with the steps of torch on one device; the verdict is the same on every rank."""
        self._phase("parity")
        checked, exchange = as_checked(self._run), self._exchange.checked
        replica: Any = checked.strategy.prepare(exchange.read("initial"), checked, self._world)  # type: ignore[arg-type]
        feed = checked.strategy.feed(arrays, checked, exchange, self._world)  # type: ignore[attr-defined]
        replica.keeps_gradients = True
        steps = count(1)

        def reference(_: Any) -> ComparedStep | None:
            """torch has taken them before this rank was started, each from its own state."""
            return exchange.step(f"expected-{next(steps)}") if self._world.rank == 0 else None

        rows = parity_rows(replica, feed, run=checked, world=self._world, reference=reference)
        replica.close()
        self._journal.write("parity", rows)
        passed = all(self._world.gather(all(row["passed"] for row in rows)))
        self._startup.done("parity")
        return passed

    def _close(self, replica: Any, feed: Any, *, evaluated: tuple[float, float]) -> None:
        """Train further steps, and hand over what they leave: torch judges them."""
        self._phase("closing check")
        run, state = self._run, replica.full_state_dict()
        self._hand_over(0, ComparedStep(evaluated[0], {}, state, evaluated))
        self._hand_over_optimizer(replica)
        replica.keeps_gradients = True
        further = CLOSING_STEPS if run.strategy.equals_one_device(run) else 0
        for step, batch in enumerate(islice(endless(feed, first=run.epochs + 1), further), start=1):
            self._hand_over(step, ComparedStep(*gathered(replica, replica.step(batch), run, self._world), evaluated))

    def _hand_over(self, number: int, step: ComparedStep) -> None:
        if self._world.rank == 0:
            self._exchange.write_step(f"closing-{number}", step)

    def _hand_over_optimizer(self, replica: Any) -> None:
        """What the optimizer keeps after the last epoch: later steps' updates follow from it."""
        kept = {key: replica.full_optimizer_state(key) for key in self._run.optimizer.kept() or ()}  # type: ignore[attr-defined]
        if self._world.rank == 0:
            arrays = {f"{key}/{name}": value for key, tensors in kept.items() for name, value in tensors.items()}
            self._exchange.write("optimizer", arrays)


def _parameters(initial: State) -> int:
    return sum(array.size for name, array in initial.items() if not name.endswith(BUFFERS))
