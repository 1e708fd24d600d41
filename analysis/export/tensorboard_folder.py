"""Runs as event files of TensorBoard: a folder per run, below one per sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from analysis.export.exported_run import ExportedRun

_TAGS = ("outcome", "parity_passed", "counts", "exclusion")
"""Tags that stand beside the parameters, so that runs can be filtered by them."""


def write_tensorboard(runs: Sequence[ExportedRun], folder: Path) -> None:
    """Write scalars, parameters and tags. TensorBoard keeps scalars in fp32: about seven digits."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    for run in runs:
        own = folder / run.sweep / run.name
        own.mkdir(parents=True)
        # TensorBoard's own writer has a thread, which would keep a full disk to itself.
        with (own / f"events.out.tfevents.{int(run.started_at)}.parallelbench").open("wb") as file:
            records = RecordWriter(file)
            records.write(Event(wall_time=run.started_at, file_version="brain.Event:2").SerializeToString())
            for wall_time, step, summary in _summaries(run):
                records.write(Event(wall_time=wall_time, step=step, summary=summary).SerializeToString())


def _summaries(run: ExportedRun) -> Iterator[tuple[float, int, Any]]:
    """Unix time, step, and what is written there. Numbers of the whole run stand at its last epoch."""
    from tensorboard.plugins.hparams import summary_v2 as hparams

    filtered = {f"tags.{name}": run.tags[name] for name in _TAGS if name in run.tags}
    known = {key: value for key, value in run.parameters.items() if value is not None}
    yield run.started_at, 0, hparams.hparams_pb(known | filtered, trial_id=run.run_id, start_time_secs=run.started_at)
    yield run.started_at, 0, _table("tags", run.tags)
    for epoch in run.epochs:
        yield epoch.finished_at, epoch.epoch, _scalars("epoch", epoch.numbers)
    at, step = (run.epochs[-1].finished_at, run.epochs[-1].epoch) if run.epochs else (run.started_at, 0)
    yield at, step, _scalars("run", run.numbers)


def _scalars(above: str, numbers: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=f"{above}/{name}", simple_value=value) for name, value in numbers.items()])


def _table(tag: str, words: Mapping[str, str]) -> Any:
    """A text, as a table in Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    rows = "\n".join(f"| {name} | {word.replace('|', ' ')} |" for name, word in words.items())
    text = f"| tag | value |\n|---|---|\n{rows}"
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto())
    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=about, tensor=tensor)])
