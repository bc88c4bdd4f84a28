"""Texts to vectors, with a checkpoint of sentence-transformers: an encoder, or a decoder whose last token is taken.

Each text is computed alone, without padding, so its vector is the same to the bit whatever is asked beside it. Owns the
model, which is in memory as a whole. One thread at a time computes.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from stowage.errors import CheckpointError, RequestError
from stowage.models import loading
from stowage.models.directory import load_tokenizer
from stowage.models.hub import find
from stowage.models.pooling import read_pipeline

_CHARACTERS_PER_TOKEN = 256
"""A text with more of them for each token that the model takes is too long without counting."""
_ENDLESS = 1 << 30
"""What a tokenizer says that knows no longest text is above this."""


class Embedder:
    """Turns texts into vectors with an embedding model. ``model``: a directory, or a hub id. Raises ``CheckpointError``
    and ``UnsupportedModelError``.

    ``dimension``: numbers in a vector; ``tokens_max``: of the longest text.
    """

    def __init__(self, model: str, dtype: str = "auto") -> None:
        directory = find(model)
        self._pipeline = read_pipeline(directory)
        loaded = loading.load(directory, dtype, whole=True, model_class="AutoModel")
        self._model, self._mapped = loaded.model, loaded.mapped
        self._tokenizer: Any = load_tokenizer(directory)
        if self._tokenizer is None:
            raise CheckpointError(f"{directory} has no tokenizer: download tokenizer.json and tokenizer_config.json.")
        stated = [
            self._pipeline.tokens_max,
            self._tokenizer.model_max_length,
            getattr(self._model.config, "max_position_embeddings", 0) or 0,
        ]
        self.tokens_max = min((n for n in stated if 0 < n < _ENDLESS), default=_ENDLESS)
        self.vocab = int(self._model.config.get_text_config().vocab_size)
        takes = inspect.signature(self._model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
        self.dimension = len(self.embed(self.tokens_of("a")))

    def tokens_of(self, text: str) -> list[int]:
        """With the tokens that stand around a text. Raises ``RequestError`` for one that is too long or empty."""
        if len(text) > _CHARACTERS_PER_TOKEN * self.tokens_max:
            raise self._too_long("more")
        text = self._pipeline.prompt + (text.lower() if self._pipeline.lower else text)
        return self.checked(list(self._tokenizer(text, truncation=False, verbose=False)["input_ids"]))

    def checked(self, tokens: list[int]) -> list[int]:
        """``tokens``, which the model takes. Raises ``RequestError``."""
        if not tokens:
            raise RequestError("A text has no tokens: give at least one.")
        if len(tokens) > self.tokens_max:
            raise self._too_long(str(len(tokens)))
        wrong = next((token for token in tokens if not 0 <= token < self.vocab), None)
        if wrong is not None:
            raise RequestError(f"{str(wrong)[:20]} is no token of this model (0 to {self.vocab - 1}).")
        return tokens

    def _too_long(self, tokens: str) -> RequestError:
        return RequestError(
            f"A text has {tokens} tokens, and this model takes at most {self.tokens_max}: cut it into pieces."
        )

    @torch.inference_mode()
    def embed(self, tokens: list[int]) -> list[float]:
        """The vector of one text, in float32. Raises ``CheckpointError`` when the model's files were written to."""
        ids = torch.tensor([tokens])
        with self._mapped.unchanged():
            out = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), **self._options)
        found: list[float] = self._pipeline.vector(out.last_hidden_state[0]).tolist()
        return found
