"""Output folder of a training: its settings, its checkpoints, and finally the model.

`training/run.json`           settings of the training; another training is refused
`training/step-000100/`       the newest checkpoint: `state.safetensors`, and `state.json`, last
`training/log.csv`, …         the curves (`curves.py`)
`training/lock`               locked while a process trains here
`training/measured.json`      figures on held-out text before and after
`config.json`, …              the finished model; the checkpoint is then deleted
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import LoadError, OptionError, WriteError
from draftsmith.storage import NEW, lock, sync_folder, write_text

TRAINING = "training"
NEEDED = ("accelerate", "peft", "matplotlib")
"""Packages of the extra `train`."""
_RUN, _STATE, _TENSORS, _MODEL = "run.json", "state.json", "state.safetensors", "model.new"
_MEASURED, _LOCK = "measured.json", "lock"
_SLOTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of each weight."""


def check_installed() -> None:
    """Raise OptionError unless the packages of the extra are installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"training needs {', '.join(missing)}; install them with `pip install "
            "'draftsmith[train]'`"
        )


@dataclass(frozen=True)
class Run:
    """One output folder."""

    folder: Path

    def check_free(self) -> None:
        """Raise OptionError for a folder with anything but an unfinished training in it."""
        if self.folder.exists() and not self.folder.is_dir():
            raise OptionError(f"{self.folder} is a file; give a new folder")
        if (self.folder / "config.json").exists():
            raise OptionError(
                f"{self.folder} already holds a model; give a new folder, nothing is overwritten"
            )
        inside = {path.name for path in self.folder.glob("*") if path != self.training}
        # A training that could not write its settings leaves these.
        inside |= {p.name for p in self.training.glob("*") if p.name != _LOCK and p.suffix != NEW}
        if inside and not (self.training / _RUN).is_file():
            raise OptionError(
                f"{self.folder} holds something else (e.g. {min(inside)}); give a new folder"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process trains in this folder; then raise as `check_free`."""
        with kept_whole(self.training):
            self.training.mkdir(parents=True, exist_ok=True)
            held = (self.training / _LOCK).open("ab")
        with held:
            lock(held)
            self.check_free()
            yield
            with suppress(OSError):  # Windows cannot delete an open file
                (self.training / _LOCK).unlink()

    @property
    def training(self) -> Path:
        """Folder of everything but the model."""
        return self.folder / TRAINING

    def begin(self, recipe: Any, about: Mapping[str, Any]) -> None:
        """Store the training's settings, or check that they equal those of an earlier start.

        `recipe` is a dataclass of settings. `about` identifies model, texts and tokens. Raises
        OptionError if any of it differs.
        """
        path = self.training / _RUN
        if path.is_file():
            known = json.loads(path.read_text(encoding="utf-8"))
            wrong = [
                f"{name}: {known[part].get(name)!r}, now {value!r}"
                for part, values in (("recipe", _plain(asdict(recipe))), ("about", about))
                for name, value in values.items()
                if known[part].get(name) != value
            ]
            if wrong:
                raise OptionError(
                    f"{self.folder} holds the checkpoint of another training ({'; '.join(wrong)}); "
                    "give another folder, or delete this one"
                )
            return
        with kept_whole(path):
            text = json.dumps({"recipe": asdict(recipe), "about": dict(about)}, indent=1)
            write_text(path, text + "\n")

    def _started(self) -> list[Path]:
        """Checkpoints, also those of which a killed process wrote a part."""
        return [*self.training.glob("step-*")]

    def _checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.training.glob(f"step-*/{_STATE}"))

    def save(
        self, step: int, seconds: float, weights: Mapping[str, Tensor], adamw: torch.optim.AdamW
    ) -> None:
        """Write a checkpoint after `step` steps, then delete the one before."""
        state = {f"weights/{name}": weight.detach() for name, weight in weights.items()}
        for name, weight in weights.items():
            for slot in _SLOTS:
                state[f"{slot}/{name}"] = adamw.state[weight][slot]
        older = self._started()
        folder = self.training / f"step-{step:06d}"
        with kept_whole(folder, folder):
            folder.mkdir(exist_ok=True)
            save_file({key: t.contiguous() for key, t in state.items()}, folder / _TENSORS)
            with (folder / _TENSORS).open("rb") as file:
                os.fsync(file.fileno())
            write_text(folder / _STATE, json.dumps({"step": step, "seconds": seconds}) + "\n")
            sync_folder(self.training)
        with kept_whole(self.training):
            for checkpoint in older:
                if checkpoint != folder:
                    shutil.rmtree(checkpoint)

    def restore(
        self, weights: Mapping[str, torch.nn.Parameter], adamw: torch.optim.AdamW
    ) -> tuple[int, float]:
        """Load the newest checkpoint; returns its steps and seconds, 0 for a new training.

        Raises LoadError for a damaged checkpoint.
        """
        found = self._checkpoints()
        if not found:
            return 0, 0.0
        try:
            known = json.loads((found[-1] / _STATE).read_text(encoding="utf-8"))
            state = load_file(found[-1] / _TENSORS)
            step, seconds = int(known["step"]), float(known["seconds"])
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(state[f"weights/{name}"])
                    adamw.state[weight] = {
                        "step": torch.tensor(float(step), device="cpu"),
                        **{slot: state[f"{slot}/{name}"].to(weight.device) for slot in _SLOTS},
                    }
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise LoadError(
                f"the checkpoint {found[-1]} cannot be read ({error}); delete it to resume from an "
                "earlier one, or from the start"
            ) from error
        return step, seconds

    def finish(self, save: Callable[[Path], None], measured: Mapping[str, Any]) -> None:
        """Let `save` write the model, and move it to the folder when it is complete."""
        fresh = self.training / _MODEL
        with kept_whole(self.folder, fresh):
            if fresh.exists():
                shutil.rmtree(fresh)
            fresh.mkdir()
            save(fresh)
            mode = (fresh / "config.json").stat().st_mode  # mode of the user's new files
            for path in filter(Path.is_file, fresh.iterdir()):
                path.chmod(mode)  # safetensors makes weights readable for their owner only
            write_text(self.training / _MEASURED, json.dumps(measured, indent=1) + "\n")
            # config.json indicates a finished model, so it comes last.
            for path in sorted(fresh.iterdir(), key=lambda path: path.name == "config.json"):
                if path.is_dir():  # left there if this was killed
                    shutil.rmtree(self.folder / path.name, ignore_errors=True)
                os.replace(path, self.folder / path.name)
            sync_folder(self.folder)
        fresh.rmdir()
        for checkpoint in self._started():
            shutil.rmtree(checkpoint)


def _plain(values: Mapping[str, Any]) -> Any:
    """Return settings as JSON stores them, with lists in place of tuples."""
    return json.loads(json.dumps(values))


@contextmanager
def kept_whole(
    path: Path,
    half: Path | None = None,
    advice: str = "give the same command again to resume from the newest checkpoint",
) -> Iterator[None]:
    """Convert errors of the disk to WriteError, after removing the incomplete folder `half`.

    The error says so if it cannot be removed.
    """
    try:
        yield
    except (OSError, SafetensorError) as raised:
        error = raised.__cause__ or raised
        reason, kept = getattr(error, "strerror", None) or error, "nothing of it was kept"
        if half is not None:
            shutil.rmtree(half, ignore_errors=True)
            if half.exists():
                kept = f"{half} is left half written, delete it"
        raise WriteError(
            f"{path} cannot be written ({reason}); {kept}. Free some space, and {advice}"
        ) from raised
