"""A strategy whose ranks do what ranks should not do, from files of the user's own."""

from __future__ import annotations

from pathlib import Path

import conf

CODE = '''
"""Data parallel training with a fault."""
import signal

from parallelbench.strategies.data_parallel import Ddp


class Faulty(Ddp, frozen=True, kw_only=True):
    """`fault` names the function that each rank executes before it trains."""

    fault: str

    def prepare(self, model, run, world):
        replica = super().prepare(model, run, world)
        FAULTS[self.fault](world)
        return replica


def raises(world):
    """Rank 1 fails by itself, then the others because of it."""
    if world.rank == 1:
        raise RuntimeError("the cable is loose")
    try:
        world.barrier()
    except RuntimeError:
        raise ValueError("and so was mine") from None


def ignores(world):
    """No rank ends when it is asked to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def hoards(world):
    """More memory than was asked for, held until somebody ends it."""
    hoard = [bytearray(b"x") * (1 << 20) for _ in range(2000)]
    signal.pause()
    del hoard


FAULTS = {"raises": raises, "ignores": ignores, "hoards": hoards}
'''


def faulty(folder: Path, fault: str) -> tuple[str, ...]:
    """Arguments of `submit` that choose the strategy; its files are written into the folder."""
    (folder / "faultystrategy.py").write_text(CODE)
    (folder / "conf" / "strategy").mkdir(parents=True)
    shipped = Path(next(iter(conf.__path__)), "strategy", "ddp.yaml").read_text()
    own = shipped.replace("parallelbench.strategies.data_parallel.Ddp", "faultystrategy.Faulty").replace(
        "name: ddp", "name: faulty"
    )
    (folder / "conf" / "strategy" / "faulty.yaml").write_text(f"{own}fault: {fault}\n")
    return ("--conf", str(folder / "conf"), "--plugin", str(folder / "faultystrategy.py"), "strategy=faulty")
