"""The agreed weights of a run as torch tensors, and as a `safetensors` file or a folder for `from_pretrained`.

A file is written under another name first and renamed at the end, so nobody sees a part of it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from atoll.errors import ConfigError, InvalidSpec
from atoll.registry import require
from atoll.rounds.weights import AgreedWeights

_EXTRA = "export"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.index.json")
_INDEX = "model.safetensors.index.json"
_SHOWN = 5


class Weights(Mapping[str, Tensor]):
    """The weights that all replicas have after `round_no` rounds, by the names that the model gives them.

    A mapping, so `model.load_state_dict(weights, strict=False)` loads them. Parameters that modules share are there
    once; frozen parameters and buffers that are not averaged are not there.
    """

    def __init__(self, agreed: AgreedWeights) -> None:
        self.run_id, self.round_no, self.has_frozen = agreed.run_id, agreed.round_no, agreed.has_frozen
        self._tensors: dict[str, Tensor] = {}
        start = 0
        for tensor in agreed.tensors:
            flat = torch.from_numpy(agreed.values[start : start + tensor.size])
            self._tensors[tensor.name] = flat.to(getattr(torch, tensor.dtype)).view(tensor.shape)
            start += tensor.size

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Weights of run {self.run_id} after {self.round_no} rounds: {len(self)} tensors>"

    def save(
        self, path: str | os.PathLike[str], *, like: str | os.PathLike[str] | None = None, force: bool = False
    ) -> list[str]:
        """Write a `safetensors` file; with `like`, a folder like that one, with its other files and tensors.

        `like` is a folder that `from_pretrained` loads; the new one can be loaded in the same way. Returns the names of
        the tensors that were taken from `like`. An existing file or folder is replaced only with `force`.
        """
        target = Path(path)
        check_target(target, is_folder=like is not None, force=force)
        save_file = require("safetensors.torch", extra=_EXTRA).save_file
        metadata = {"format": "pt", "atoll.run": self.run_id, "atoll.rounds": str(self.round_no)}
        fresh = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if like is None:
                save_file(self._tensors, os.fspath(fresh), metadata=metadata)
                os.replace(fresh, target)
                return []
            merged, taken = self._merged(Path(like))
            _copy_other_files(Path(like), fresh)
            save_file(merged, os.fspath(fresh / "model.safetensors"), metadata=metadata)
            _replace_folder(fresh, target)
            return taken
        except OSError as exc:
            raise ConfigError(f"cannot write `{target}`: {exc.strerror or exc}", reason="cannot_write") from exc
        finally:
            if fresh.is_dir():
                shutil.rmtree(fresh, ignore_errors=True)
            else:
                with suppress(OSError):
                    fresh.unlink()

    def _merged(self, like: Path) -> tuple[dict[str, Tensor], list[str]]:
        """The tensors of `like` with these weights in their place, and the names of those that `like` supplies."""
        theirs = _tensors_of(like)
        names = _names_there(self, theirs)
        unknown = [name for name, there in names.items() if there not in theirs]
        problems = [f"{name}: the run has it, `{like}` has not" for name in unknown[:_SHOWN]]
        if len(unknown) > _SHOWN:
            problems.append(f"{unknown[_SHOWN]}: and {len(unknown) - _SHOWN - 1} more in the run only")
        for name, own in names.items():
            if own in theirs and theirs[own].shape != self[name].shape:
                here, there = list(self[name].shape), list(theirs[own].shape)
                problems.append(f"{name}: shape {here} in the run, {there} in `{like}`")
        if problems:
            raise InvalidSpec(f"`{like}` for the weights of run `{self.run_id}`", problems)
        ours = {own: self[name] for name, own in names.items()}
        if not self.has_frozen:
            ours |= _copies(theirs, ours)
        return {**theirs, **ours}, [name for name in theirs if name not in ours]


def _copies(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The new values of tensors of a folder that are copies of others there, as of parameters that modules share.

    A tensor with only one value, such as zeros, is no sign of that.
    """
    found: dict[str, Tensor] = {}
    for name in (name for name in theirs if name not in ours):
        old = theirs[name]
        if old.numel() < 2 or bool((old == old.flatten()[0]).all()):
            continue
        original = next((own for own in ours if torch.equal(theirs[own], old)), None)
        if original is not None:
            found[name] = ours[original].clone()
    return found


def _names_there(ours: Iterable[str], theirs: Collection[str]) -> dict[str, str]:
    """The name in a folder of each tensor of a run.

    The weights of a model without its head lack the prefix that the model with the head gives them, such as
    `transformer.`, and the other way round; `from_pretrained` loads both. So a prefix is left out, or added, if the
    folder has all tensors then.
    """
    same = {name: name for name in ours}
    unknown = [name for name in same if name not in theirs]
    if not unknown:
        return same
    left_out = unknown[0].partition(".")[0] + "."
    tries = [{name: name.removeprefix(left_out) for name in same}]
    heads = dict.fromkeys(name.partition(".")[0] + "." for name in theirs if name.endswith(f".{unknown[0]}"))
    tries += [{name: head + name for name in same} for head in heads]
    return next((names for names in tries if all(name in theirs for name in names.values())), same)


def check_target(target: Path, *, is_folder: bool, force: bool) -> None:
    """Raise `ConfigError` if the weights cannot be written there."""
    if is_folder and target.exists() and not target.is_dir():
        raise ConfigError(f"`{target}` is a file; with `like`, a folder is written", reason="exists")
    if not is_folder and target.is_dir():
        hint = f"name a file in it, such as `{target / 'model.safetensors'}`; `--like DIR` writes a folder"
        raise ConfigError(f"`{target}` is a folder", reason="exists", hint=hint)
    if target.exists() and not force:
        raise ConfigError(f"`{target}` exists already", reason="exists", hint="`--force` replaces it")


def check_like(like: Path) -> list[Path]:
    """The files with the weights of a folder that `from_pretrained` loads; `ConfigError` if it has none."""
    if not (like / "config.json").is_file():
        hint = "name a local folder that `save_pretrained` wrote, or that was downloaded from the Hub"
        raise ConfigError(f"`{like}` is not a folder with a `config.json`", reason="like", hint=hint)
    if (like / _INDEX).is_file():
        try:
            names = json.loads((like / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
            found = [like / name for name in sorted(set(names))]
        except (ValueError, KeyError, AttributeError, TypeError) as exc:
            raise ConfigError(f"`{like / _INDEX}` is not an index of weights: {exc}", reason="like") from exc
    else:
        found = [like / "model.safetensors"]
    missing = [path.name for path in found if not path.is_file()]
    if missing:
        hint = "`save_pretrained` of the loaded model writes it; other formats are not read, because they are pickles"
        raise ConfigError(f"`{like}` has no `{missing[0]}`", reason="like", hint=hint)
    return found


def _tensors_of(like: Path) -> dict[str, Tensor]:
    load_file = require("safetensors.torch", extra=_EXTRA).load_file
    found: dict[str, Tensor] = {}
    for path in check_like(like):
        try:
            found.update(load_file(os.fspath(path)))
        except Exception as exc:
            raise ConfigError(f"`{path}` cannot be read: {exc}", reason="like") from exc
    return found


def _copy_other_files(like: Path, target: Path) -> None:
    """Copy the configuration and the tokenizer: all files of the folder that hold no weights."""
    target.mkdir()
    for path in sorted(like.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copyfile(path, target / path.name)


def _replace_folder(fresh: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        os.rename(target, old)
    os.rename(fresh, target)
    shutil.rmtree(old, ignore_errors=True)
