"""Writes a model's weights with its large matrices packed, one parameter at a time, as Transformers' loading leaves
them: renamed, stacked and fused, so that nothing is left to convert when they are loaded.

Large tensors are written as they come, in whole pages most often; small ones, and those of odd sizes, come last. So
every packed matrix begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.core.geometry import ALIGNMENT_BYTES, PAGE_BYTES, round_up
from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.weights.building import Building
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.quantized.codes import Form
from stowage.weights.quantized.modules import METHOD, Target, targets
from stowage.weights.safetensors_file import SafetensorsFile, not_taken
from stowage.weights.tied import resolve_tied

_WAITS_BELOW_BYTES: Final = 64 << 10
_ENTRY_BYTES: Final = 200
"""Of a tensor in the header besides its name (twice), at most: type, dimensions, offsets, its number of weights."""


@dataclass(slots=True)
class Written:
    """What was written. ``packed``: tensors by form; those of layers and experts, without the output layer, have
    ``weights`` numbers and take ``packed_bytes``. ``kept``: other tensors. ``untied``: whether the files hold another
    output layer than the embedding that the config ties it to.
    """

    packed: dict[str, int]
    weights: int = 0
    packed_bytes: int = 0
    kept: int = 0
    nbytes: int = 0
    untied: bool = False


def write(
    files: Sequence[Path],
    build: Callable[[], Any],
    path: Path,
    pack: Callable[[Target, Tensor], tuple[Form, Tensor]],
    progress: Callable[[int, int], None],
) -> Written:
    """``build`` loads the model from ``files``, with Transformers; it is written to ``path``, which is new, with each
    matrix in the form, and as the bytes, that ``pack`` makes of it.

    ``progress`` is told how many tensors are done, of how many. The memory for it is the largest parameter, some times
    over. Raises UnsupportedModelError when there is nothing to pack, CheckpointError, StorageError, and whatever
    ``build`` raises.
    """
    checkpoint = Checkpoint(files)
    try:
        writing = _Writing(checkpoint, path, pack, progress)
        try:
            writing.finish(writing.build(build))
        finally:
            writing.file.close()
        return writing.written
    except OSError as error:
        raise not_taken(path.parent, error) from error
    finally:
        checkpoint.close()


class _Writing(Building):
    def __init__(
        self,
        checkpoint: Checkpoint,
        path: Path,
        pack: Callable[[Target, Tensor], tuple[Form, Tensor]],
        progress: Callable[[int, int], None],
    ) -> None:
        super().__init__(checkpoint)
        self.written = Written({})
        self._path, self._pack, self._progress = path, pack, progress
        self._targets: dict[str, Target] = {}
        self._wanted: set[str] = set()
        self._all = 0
        self._packed: dict[str, int] = {}
        self._waiting: list[tuple[str, Tensor]] = []
        self.file = SafetensorsFile(path)

    def begin(self, root: nn.Module) -> None:
        said = dict(getattr(root, "all_tied_weights_keys", None) or {})
        resolve_tied(root, self.checkpoint)
        self._targets = {target.path: target for target in targets(root)}
        if not self._targets:
            raise UnsupportedModelError(
                "this model has no linear layers or stacked experts that could be packed (GPT-2's are of a kind of its "
                "own): run it as it is."
            )
        tied = getattr(root, "all_tied_weights_keys", None) or {}
        self.written.untied = said.keys() != tied.keys()
        self._wanted = {name for name in root.state_dict() if tied.get(name, name) == name}
        self._all = len(self._wanted)
        names_bytes = sum(_ENTRY_BYTES + 2 * len(json.dumps(name)) for name in self._wanted)
        self.file.data_at = round_up(8 + 256 + names_bytes)

    def put(self, path: str, parameter: nn.Parameter) -> nn.Parameter:
        values = parameter.detach()
        if type(values) is not Tensor or values.layout is not torch.strided:
            raise UnsupportedModelError(
                f"{path} is a {type(values).__name__}, no plain tensor: the checkpoint is quantised already. Pack the "
                "original that it was made from."
            )
        try:
            self._take(path, values)
        except OSError as error:  # Transformers calls this, and would be told that it could not read
            raise not_taken(self._path.parent, error) from error
        nothing = torch.zeros(1, dtype=values.dtype).expand(values.shape)
        return nn.Parameter(nothing, requires_grad=False)

    def finish(self, model: Any) -> None:
        """Buffers, what has waited, and the header. Raises CheckpointError when a tensor never came."""
        buffers = dict(model.named_buffers())
        for name in sorted(self._wanted & buffers.keys()):
            self._take(name, buffers[name].detach())
        if self._wanted:
            raise CheckpointError(
                f"{sorted(self._wanted)[0]} was not loaded, so the packed checkpoint would not be whole: download the "
                "checkpoint again."
            )
        self._waiting.sort(key=lambda waiting: (waiting[1].nbytes % ALIGNMENT_BYTES > 0, -waiting[1].nbytes))
        for name, values in self._waiting:
            self.file.append(name, values)
        self.file.finish({"format": "pt", METHOD: json.dumps(self._packed, separators=(",", ":"))})
        self.written.nbytes = self.file.data_at + self.file.nbytes

    def _take(self, path: str, values: Tensor) -> None:
        if path not in self._wanted:
            return
        self._wanted.remove(path)
        target = self._targets.get(path)
        if target is None:
            self._put_off(path, values.contiguous())
            self.written.kept += 1
        else:
            form, packed = self._pack(target, values)
            name = target.packed_name(form.name)
            self._put_off(name, packed)
            self._packed[name] = values.numel()
            self.written.packed[form.name] = self.written.packed.get(form.name, 0) + 1
            if not target.head:
                self.written.packed_bytes += packed.nbytes
                self.written.weights += values.numel()
        self._progress(self._all - len(self._wanted), self._all)

    def _put_off(self, name: str, values: Tensor) -> None:
        small = values.nbytes < _WAITS_BELOW_BYTES and values.nbytes % PAGE_BYTES
        if small or values.nbytes % ALIGNMENT_BYTES:
            self._waiting.append((name, values.clone()))
        else:
            self.file.append(name, values)
