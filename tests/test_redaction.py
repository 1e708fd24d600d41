"""What looks like a token is written nowhere: over forty shapes of tokens are planted, and every file is searched."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import polars as pl
import pytest

from analysis import load
from analysis.export import exported_runs
from launch.attempt.processes import redacted_log
from launch.verbs.export import TRACKERS
from parallelbench import cli
from parallelbench.errors import one_line, refusal
from parallelbench.redaction import redacted
from parallelbench.results import journal
from tests.analysis.factory import Fake, config, published
from tests.faults import fault
from tests.helpers import TINY
from tests.launch.conftest import user
from tests.launch.programs import program
from tests.test_cli import here, refused

__all__ = ["here", "user"]

ROOT = Path(__file__).resolve().parents[1]


def drawn(length: int, kind: str = "") -> str:
    """Letters and digits as tokens have them, the same each time; none of it was ever a token."""
    digest = base64.b64encode(hashlib.sha512(f"{length} {kind}".encode()).digest() * 3).decode()
    return "x7Q" + re.sub("[^A-Za-z0-9]", "", digest)[: length - 3]


UPPER = drawn(16).upper()
HEX = hashlib.md5(b"parallelbench").hexdigest()
PEM = f"-----BEGIN RSA PRIVATE KEY-----\nMIIE{drawn(60)}\n{drawn(64)}\n-----END RSA PRIVATE KEY-----"
TOKENS = {
    "jwt": (f"eyJ{drawn(20)}.eyJ{drawn(40)}.{drawn(43)}", None),
    "Hugging Face": ("hf_" + drawn(34), None),
    "GitHub": ("ghp_" + drawn(36), None),
    "GitHub, of a server": ("ghs_" + drawn(36, "s"), None),
    "GitHub, fine-grained": (f"github_pat_{drawn(22)}_{drawn(59)}", None),
    "GitLab": ("glpat-" + drawn(20), None),
    "AWS": ("AKIA" + UPPER, None),
    "AWS, for a while": ("ASIA" + UPPER[::-1], None),
    "AWS's secret": ("AWS_SECRET_ACCESS_KEY=" + drawn(40, "aws"), drawn(40, "aws")),
    "OpenAI": ("sk-" + drawn(48), None),
    "OpenAI, of a project": (f"sk-proj-{drawn(30)}_{drawn(30)}-x", drawn(30)),
    "Anthropic": (f"sk-ant-api03-{drawn(40)}", None),
    "NVIDIA": ("nvapi-" + drawn(64), None),
    "Slack": (f"xoxb-1234567890-{drawn(24)}", None),
    "Slack's webhook": (f"https://hooks.slack.com/services/T0AAAAAAA/B0AAAAAAA/{drawn(24, 'w')}", drawn(24, "w")),
    "Stripe": ("sk_live_" + drawn(24, "live"), None),
    "Google": ("AIza" + drawn(35), None),
    "Google, OAuth": ("ya29." + drawn(60), None),
    "PyPI": ("pypi-AgEIcHlwaS5vcmc" + drawn(60, "pypi"), None),
    "npm": ("npm_" + drawn(36, "npm"), None),
    "Docker": ("dckr_pat_" + drawn(27), None),
    "DigitalOcean": ("dop_v1_" + HEX * 2, None),
    "Vault": ("hvs." + drawn(60, "vault"), None),
    "Databricks": ("dapi" + HEX, None),
    "SendGrid": (f"SG.{drawn(22, 'a')}.{drawn(43, 'b')}", None),
    "Terraform": (f"{drawn(14)}.atlasv1.{drawn(60, 'tf')}", None),
    "Terraform's variable": ("TF_VAR_database=hunter2hunter2", "hunter2hunter2"),
    "age": ("AGE-SECRET-KEY-1" + drawn(58).upper(), None),
    "munge": (f"MUNGE:{drawn(80)}:", None),
    "URL": (f"postgresql://me:{drawn(12, 'url')}@db.example.org/runs", drawn(12, "url")),
    "URL of a user with @": (f"https://me@here.org:{drawn(10, '@')}@git.example.org/x.git", drawn(10, "@")),
    "Azure, signed URL": (
        f"https://me.blob.core.windows.net/a.npz?sv=2024-11-04&se=2026-12-01T00%3A00Z&sp=r&sig={drawn(40, 'sas')}%3D",
        drawn(40, "sas"),
    ),
    "Azure, within another URL": (f"?u=https%3A%2F%2Fme.net%2Fa%3Fsp%3Dr%26sig%3D{drawn(40, 'in')}", drawn(40, "in")),
    "Azure, in capitals": (f"https://me.net/a.npz?SP=r&SIG={drawn(40, 'SAS')}", drawn(40, "SAS")),
    "CloudFront, without a digit": (
        "https://d.cloudfront.net/a?Expires=1&Signature=abc-DEF~ghi_JKLMNOP",
        "abc-DEF~ghi_JKLMNOP",
    ),
    "a signed URL, encoded twice": (
        f"?u=https%253A%252F%252Fme.net%252Fa%253Fsig%253D{drawn(40, 'two')}",
        drawn(40, "two"),
    ),
    "S3, signed URL": (f"https://b.s3.amazonaws.com/k?X-Amz-Date=20261128T1Z&X-Amz-Signature={HEX * 2}", HEX * 2),
    "S3, signed as before": (
        f"https://b.s3.amazonaws.com/k?Expires=1795860000&Signature={drawn(20, 's3')}%2B{drawn(20, 's3')}%3D",
        drawn(20, "s3"),
    ),
    "Google, signed URL": (f"https://storage.googleapis.com/b/k?X-Goog-Signature={HEX * 16}", HEX * 16),
    "GitHub, raw file": (f"https://raw.githubusercontent.com/me/x/data.csv?token={drawn(29, 'raw')}", drawn(29, "raw")),
    "header": (f"Authorization: Bearer {drawn(40, 'h')}", drawn(40, "h")),
    "password": (f"password={drawn(14, 'pw')}", drawn(14, "pw")),
    "Weights & Biases": (f"WANDB_API_KEY={hashlib.sha1(b'wandb').hexdigest()}", hashlib.sha1(b"wandb").hexdigest()),
    "Slurm": (f"SLURM_JWT={drawn(50, 'slurm')}", drawn(50, "slurm")),
    "private key": (PEM, drawn(64)),
}
"""What it is of → how it stands in a text, and what of that is secret; None: all of it."""
SECRETS = {name: secret or text for name, (text, secret) in TOKENS.items()}


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_is_found_wherever_it_stands(name: str) -> None:
    text, secret = TOKENS[name][0], SECRETS[name]
    quoted = json.dumps(json.dumps({"text": text}))
    for written in (text, f"a {text} b", f"--x={text}", f"'{text}'", f"/data/{text}/file", quoted, repr({"X": text})):
        assert secret not in redacted(written), written
        assert redacted(redacted(written)) == redacted(written)
    assert isinstance(json.loads(json.loads(redacted(quoted)))["text"], str)
    for told in (one_line(f"ValueError: {text}"), refusal(f"ValueError: {text}")):
        assert secret not in told
    assert redacted(f"before {text} after").startswith("before ")


def test_what_is_no_token_stays() -> None:
    sha256 = hashlib.sha256(b"run").hexdigest()
    for text in (
        *(sha256, f"digits-cnn_small-ddp-x2-r0-{sha256[:8]}", f"sha256:{sha256}", f"/home/me/runs/{sha256}/result"),
        *("task-of-a-long-name-that-goes-on-20261125", "disk-usage", "hf_hub_download_of_a_data_set", "sk-learn-1.5"),
        *("npm_config_user_agent_of_a_program", "tcp://10.0.0.1:29500", "ssh://git@github.com:22/me/x.git"),
        *("f(signature=signature_of_a_function)", "sig=SIGTERM", "config=cnn_small_on_digits_20261128", "sig=15"),
        *("https://host.org/a?key=value&sort=newest", "https://host.org/page?design=20261128202611282026"),
        *("https://me@host.org/path:1@2", "tokens_per_sample: 128", "TOKENIZERS_PARALLELISM=false", "GPU-" + sha256),
        *("s3://bucket/key:with/colon@2x.png", "monkey=1", "[::1]:29500", "-----BEGIN CERTIFICATE-----"),
    ):
        assert redacted(text) == text
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("conf/**/*.yaml")]
    assert len(pages) > 50
    for page in pages:
        assert redacted(page.read_text(encoding="utf-8")) == page.read_text(encoding="utf-8"), page


@pytest.mark.exhaustive
def test_a_log_has_all_that_was_printed_but_for_tokens(tmp_path: Path) -> None:
    """Whoever prints, in whichever pieces: Python, another program, without a last line break."""
    log = tmp_path / "log.txt"
    code = (
        "import os, sys\n"
        "for text in sys.argv[1:]:\n"
        "    print('one', text, flush=True)\n"
        "    if text == sys.argv[1]: print('x' * 200_000, flush=True)\n"
        "    os.write(2, b'\\xff\\xfe noise\\n')\n"
        "    for letter in '\\n' + text: os.write(1, letter.encode())\n"
        "    if text != sys.argv[-1]: print(flush=True)\n"
    )
    with redacted_log(log) as pipe:
        texts = [text for text, _ in TOKENS.values()]
        subprocess.run([sys.executable, "-c", code, *texts], stdout=pipe, stderr=pipe, check=True)
    written = log.read_bytes()
    assert [name for name, secret in SECRETS.items() if secret.encode() in written] == []
    assert written.count(b"one ") == written.count(b"\xff\xfe noise\n") == len(TOKENS)
    assert written.count(b"x" * 200_000) == 1


def test_a_command_line_that_holds_a_token_is_refused_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (text, _) in TOKENS.items():
        for arguments in (
            ("run", *TINY, f"data.note={text}"),
            ("submit", *TINY, f"sweep.name={text}"),
            ("report", text),
            ("bundle", ".", "--title", text),
        ):
            message = refused(capsys, *arguments)
            assert SECRETS[name] not in message
            if name != "private key":  # line breaks are refused before
                assert "what looks like a secret" in message, name
    assert not list(here.iterdir())


def test_a_file_of_settings_that_holds_a_token_is_refused_with_its_key(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "conf" / "site").mkdir(parents=True)
    text = TOKENS["Hugging Face"][0]
    shipped = (ROOT / "conf" / "site" / "default.yaml").read_text(encoding="utf-8")
    lines = {"name": "mine", "setup": f"['export HF_TOKEN={text}']"}
    for key, value in lines.items():
        shipped = re.sub(f"^{key}:.*$", f"{key}: {value}", shipped, flags=re.MULTILINE)
    (here / "conf" / "site" / "mine.yaml").write_text(shipped)
    message = refused(capsys, "submit", *TINY, "site=mine", "--conf", "conf")
    assert "site.setup holds what looks like a secret" in message
    assert text not in message
    assert [path.name for path in here.iterdir()] == ["conf"]


# --- everything that is written


def contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """All files below a folder: their names, what they hold, and what is packed in them."""
    for file in sorted(path.rglob("*")):
        yield str(file), str(file.relative_to(path)).encode()
        if file.is_file():
            yield from _unpacked(str(file), file.read_bytes())


def _unpacked(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    yield name, content
    if name.endswith(".tar.gz"):
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive.getmembers():
                yield name, member.name.encode()
                file = archive.extractfile(member)
                assert file is not None
                yield from _unpacked(f"{name}/{member.name}", file.read())
    elif name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            for inner in packed.namelist():
                yield from _unpacked(f"{name}/{inner}", packed.read(inner))
    elif name.endswith(".parquet"):
        yield name, repr(pl.read_parquet(content).select(pl.col(pl.String)).rows()).encode()
    elif name.endswith(".html"):
        for part in re.findall(rb"H4sI[A-Za-z0-9+/=]{100,}", content):
            yield name, gzip.decompress(base64.b64decode(part))


def found_in(path: Path) -> list[str]:
    """Where which secret stands."""
    return [f"{what} in {name}" for name, content in contents(path) for what in _secrets_in(content)]


def _secrets_in(content: bytes) -> list[str]:
    parts = {what: secret.encode() for what, secret in SECRETS.items()}
    return [
        what
        for what, secret in parts.items()
        if secret in content or json.dumps(secret.decode())[1:-1].encode() in content
    ]


LEAKING = '''
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

from parallelbench.strategies.single import Single

TOKENS = Path(os.environ["WHERE"]).read_text().split("\\0")


class Leaking(Single, frozen=True, kw_only=True):
    """Prints what it should not, in every way, and fails with it where it is asked to."""

    fails: int

    def prepare(self, model, run, world):
        for text in TOKENS:
            print(text, flush=True)
            warnings.warn(text)
            logging.getLogger("mine").error(text)
            os.write(2, f"{text}\\n".encode())
        subprocess.run(["cat", os.environ["WHERE"]], check=True)
        if self.fails >= 0:
            from mystrategies import MODULE

            MODULE.fail(TOKENS[self.fails])
        return super().prepare(model, run, world)
'''
FAILING = "def fail(text):\n    open(f'/nowhere/{text}')\n"
FILE = TOKENS["GitHub"][0]
"""A name that a module may have."""


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "Secrets in variables, in what is printed and in errors",
    injection="42 shapes of tokens in variables, in what a strategy of one's own prints and raises, and in its file",
    outcome="neither the runs' files nor a report, a bundle or an export hold any of them",
)
def test_no_file_of_a_run_a_report_a_bundle_or_an_export_holds_a_token(
    user: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path_factory.mktemp("hidden") / "tokens"
    hidden.write_text("\0".join(text for text, _ in TOKENS.values()))
    package = user / "mystrategies"
    (package / f"{FILE}.py").write_text(FAILING)
    load_it = f"import importlib\nMODULE = importlib.import_module('mystrategies.{FILE}')\n"
    (package / "__init__.py").write_text(LEAKING + load_it)
    (user / "conf" / "strategy" / "mine.yaml").write_text("_target_: mystrategies.Leaking\nname: mine\nfails: -1\n")
    monkeypatch.setenv("WHERE", str(hidden))
    monkeypatch.setenv("SLURM_JWT", SECRETS["Slurm"])
    monkeypatch.setenv("TF_VAR_database", SECRETS["Terraform's variable"])
    monkeypatch.setenv("WANDB_API_KEY", SECRETS["Weights & Biases"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS["AWS's secret"])
    for number, (text, _) in enumerate(TOKENS.values()):
        monkeypatch.setenv(f"NCCL_PLANTED_{number}", text)
    own = ("--conf", "conf", "--plugin", "mystrategies", *TINY, "epochs=1", "measure.probe=false", "results=results")
    every = ",".join(map(str, range(-1, len(TOKENS), 18)))
    done = program(user, "submit", *own, "strategy=mine", f"strategy.fails={every}", "launcher.pack=true")
    assert done.returncode == 1, done.stderr + done.stdout
    done = program(user, "run", *own, "strategy=mine", "strategy.fails=0")
    assert "OSError" in done.stdout + done.stderr or "FileNotFoundError" in done.stdout + done.stderr
    for arguments in (("report", "results"), ("bundle", "results", "--out", "a.tar.gz")):
        done = program(user, *arguments, "--plugin", "mystrategies")
        assert done.returncode == 0, done.stderr
    for tracker in (name for name, each in TRACKERS.items() if find_spec(each.module)):
        assert program(user, "export", "results", "--to", tracker).returncode == 0
    shutil.rmtree(package)  # the user's own
    logs = [log.read_text(errors="replace") for log in (user / "results").rglob("log.txt")]
    assert len(logs) == 4
    assert all("redacted-GitHub-token" in log and "redacted-private-key" in log for log in logs)
    assert found_in(user) == []
    assert [
        what for run in exported_runs(load(user / "results", plugin=None)) for what in _secrets_in(repr(run).encode())
    ] == []


@pytest.mark.exhaustive
def test_what_a_table_or_a_record_holds_is_in_no_report_and_refuses_the_bundle(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = json.loads(Fake().environment)
    environment["variables"] = {f"NCCL_PLANTED_{number}": text for number, (text, _) in enumerate(TOKENS.values())}
    environment["variables"] |= {"SLURM_JWT": SECRETS["Slurm"], "TF_VAR_x": SECRETS["Terraform's variable"]}
    results = here / "results"
    with monkeypatch.context() as patched:
        patched.setattr(journal, "redacted", lambda text: text)
        planted = published(config(results), Fake(environment=json.dumps(environment)))
    run = published(config(results, strategy="ddp", devices=2))
    assert "Hugging Face" in {found.partition(" in ")[0] for found in found_in(results)}, "planted"
    assert cli.main(["report", "results", "--out", "page"]) == 0
    assert found_in(here / "page") == []
    capsys.readouterr()
    table = f"results/demo/{planted.path.name}/result/run.parquet holds what looks like a secret ("
    assert table in refused(capsys, "bundle", "results", "--out", "a.tar.gz")
    shutil.rmtree(planted.path)
    attempt = run.attempts()[-1].path / "error-rank0.json"
    attempt.write_text(json.dumps({"rank": 0, "kind": "error", "reason": TOKENS["Slack"][0], "time": 0.0}))
    record = f"results/demo/{run.path.name}/attempts/1/error-rank0.json holds what looks like a secret (Slack"
    assert record in refused(capsys, "bundle", "results", "--out", "a.tar.gz")
    assert not (here / "a.tar.gz").exists()
    attempt.unlink()
    assert cli.main(["bundle", "results", "--out", "a.tar.gz"]) == 0
