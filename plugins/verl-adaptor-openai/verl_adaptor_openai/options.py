"""What the openai engine understands beyond `EngineConfig`."""

from __future__ import annotations

from verl_adaptor.config.base import BackoffSeconds, Config, HttpUrl, Retries, Seconds


class OpenAIOptions(Config):
    """Options of the ``openai`` engine."""

    base_url: HttpUrl | None = None
    """Address of the server, ``http://host:port``, with or without ``/v1``."""
    served_model: str | None = None
    """Name under which the server serves the model. None: the only one that it serves."""
    api_key_env: str | None = None
    """Environment variable that holds the server's API key; the key itself belongs in no config. None: there is none."""
    request_timeout_s: Seconds = 600.0
    """Longest that one request may take, from its sending to its last token, in seconds."""
    update_timeout_s: Seconds = 1800.0
    """Longest that the server may take to load new weights, in seconds."""
    retries: Retries = 3
    """How often a request is repeated that found no server, or one that is too busy (429, 502, 503, 504). One that was
    answered, or that timed out, is never repeated."""
    backoff_s: BackoffSeconds = 0.5
    """Longest pause before the first repetition, in seconds; it doubles each time."""
    weight_folder: str | None = None
    """Folder for new weights, which the server sees under the same path. None: the one for temporary files."""
    reload: bool = False
    """Have the server load the model's folder anew when the engine is made, so that version 0 is that model, whatever
    was synced before. Needs what weight updates need."""
