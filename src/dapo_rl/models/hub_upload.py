"""Uploads a saved model to the Hugging Face hub. What can go wrong is one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dapo_rl.base.hub import hub_problem
from dapo_rl.base.quote import one_line
from dapo_rl.errors import UserError

LOGIN = "log in with `hf auth login`, set HF_TOKEN, or pass token="


def write_card(folder: Path, base_model: str, dataset_name: str | None = None, tags: Sequence[str] = ()) -> None:
    """Writes a short model card, unless the folder has one, as that of an adapter does."""
    path = folder / "README.md"
    if path.exists():
        return
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "tags": ["dapo-rl", "dapo", "reinforcement-learning", *([tags] if isinstance(tags, str) else tags)],
    }
    if is_hub_name(base_model):
        metadata["base_model"] = base_model
    if dataset_name is not None and is_hub_name(dataset_name):
        metadata["datasets"] = [dataset_name]
    head = yaml.safe_dump(metadata, sort_keys=False)
    start = base_model if is_hub_name(base_model) else Path(base_model).name  # not where it lies on this machine
    path.write_text(f"---\n{head}---\n\nTrained with dapo-rl, by DAPO, from {one_line(start)}.\n", encoding="utf-8")


def is_hub_name(name: str) -> bool:
    """Whether a name can be a repository, `owner/name`, rather than a directory."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def push_folder(
    folder: Path,
    repo_id: str,
    commit_message: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Uploads the files of a folder in one commit; returns its address. Creates the repository if it is missing."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    where = f"push_to_hub: {repo_id}"
    if problem := hub_problem():
        raise UserError(f"{where}: the hub cannot be reached: {problem}; save_model writes the model to a directory")
    token = token or get_token()
    if token is None:
        raise UserError(f"{where}: not logged in to {constants.ENDPOINT}; {LOGIN}")
    api = HfApi(endpoint=constants.ENDPOINT, token=token, library_name="dapo-rl")
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message=commit_message, revision=revision
        )
    except HFValidationError as error:
        raise UserError(f"{where}: is not the name of a repository: {one_line(error)}") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hint = f"; {LOGIN}, with a token that may write there" if status in (401, 403) else ""
        raise UserError(f"{where}: the hub refused it: {one_line(error)}{hint}") from error
    except Exception as error:  # of the HTTP library in use
        if isinstance(error, OSError | ValueError) or type(error).__module__.startswith(("httpx", "requests")):
            raise UserError(f"{where}: the upload failed: {one_line(error)}") from error
        raise
    return str(commit.commit_url)
