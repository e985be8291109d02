"""Looking at a model folder without loading anything from it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from verl_adaptor.errors import ModelError

_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def read_model_config(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The folder's ``config.json``; None where `path` is a hub id, which only the framework can resolve.

    Raises:
        ModelError: a local path that is no model folder.
    """
    folder = Path(path).expanduser()
    if not folder.exists() and isinstance(path, str) and _HUB_ID.fullmatch(path):
        return None
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ModelError(
            f"model path {str(path)!r} {what}; give a Hugging Face model folder, or a hub id 'owner/name'."
        )
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json: it is no Hugging Face model folder.") from None
    except ValueError as error:
        raise ModelError(f"{file} cannot be read: {error}. Save or fetch the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds no JSON object. Save or fetch the model again.")
    return content
