"""Uploads a saved model to the Hugging Face hub. What can go wrong is one line."""

from __future__ import annotations

from pathlib import Path

from dapo_rl.base.hub import hub_problem
from dapo_rl.base.quote import one_line
from dapo_rl.errors import UserError

LOGIN = "log in with `hf auth login`, set HF_TOKEN, or pass token="


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
