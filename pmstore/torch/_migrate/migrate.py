"""A stored run made to fit a program that has changed, as its `Resume` says: each of its pieces.

It is done in the store alone, in one transaction, before the program is bound: then the run is as
if it had always been the program's, and is resumed as any other. A death in between leaves it as it
was, or whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pmstore import Store
from pmstore._base.text import encode_name
from pmstore.torch._data.position import Place, Position
from pmstore.torch._data.samples import keep_samples
from pmstore.torch._migrate.differences import Choices, compare, has_more
from pmstore.torch._migrate.optimizer_groups import HeldOptimizer, names_of, stand_in
from pmstore.torch._migrate.schedule_state import Rates
from pmstore.torch._state.common_part import copy_common
from pmstore.torch._state.mirrored import packed_whole
from pmstore.torch._state.module_attributes import conflicts, describe, take_given
from pmstore.torch._state.optimizer import OptimizerBinding
from pmstore.torch._state.optimizer_state import read_layout
from pmstore.torch._state.requires_grad import read_trainable
from pmstore.torch._state.sharded import HOW_TO_RESHARD
from pmstore.torch._state.stateful import StatefulPart
from pmstore.torch._step.progress import Progress
from pmstore.torch.kept_structure import Structure
from pmstore.torch.optim.base import NativeOptimizer
from pmstore.torch.parts import Pieces
from pmstore.torch.program import Program
from pmstore.torch.resume import Resume
from pmstore.torch.run_errors import AttachError, ChangedError, MismatchError
from pmstore.torch.settings import Settings, fingerprint, plain


class Fitting:
    """What `adapt` does inside its transaction."""

    def __init__(
        self,
        store: Store,
        name: str,
        program: Program,
        choices: Choices,
        settings: Mapping[str, Settings],
    ) -> None:
        """settings: the stored ones. Changes nothing yet."""
        self._store = store
        self._name = name
        self._program = program
        self._choices = choices
        self._settings = settings
        self._pieces = Pieces(store, name, program)

    @property
    def needed(self) -> bool:
        """Whether tensors or groups are not as they are stored."""
        try:
            self._pieces.check(regrouped=self._choices.by_name)
        except MismatchError:
            return True
        return False

    def release(self) -> None:
        """The pieces are to be made anew."""
        self._pieces.placement.release()

    def check(self) -> None:
        """Raises: MismatchError: it still does not fit."""
        Pieces(self._store, self._name, self._program).check()

    def fit(self, missing: list[str], added: list[str]) -> None:
        """missing: pieces that are stored and not given; added: the other way round.

        Raises: AttachError, MismatchError: what is stored of one cannot be made to fit.
        """
        kinds = {piece.partition("/")[0] for piece in (*missing, *added)}
        if self._program.mirrored and kinds & {"model", "optimizer"}:
            raise packed_whole()
        self._drop(missing)
        self._fit(missing, added)

    def _drop(self, pieces: list[str]) -> None:
        """Tensors of models are dropped with the others that are gone."""
        for piece in pieces:
            if piece.partition("/")[0] != "model":
                self._store.pop(f"{self._name}/{piece}", None)
        if not self._program.models:
            self._store.pop(f"{self._name}/model", None)
            self._store.pop(f"{self._name}/model_layout", None)
        if not self._program.optimizers:
            self._store.pop(f"{self._name}/gradients", None)
            self._store.pop(f"{self._name}/gradients_layout", None)

    def _fit(self, missing: list[str], added: list[str]) -> None:
        other_models = any(piece.partition("/")[0] == "model" for piece in (*missing, *added))
        by_name = other_models or self._choices.partial
        dtypes = self._stored_dtypes()
        self._fit_model(by_name)
        rates = Rates(self._store, self._name, self._program, self._choices)
        for binding in self._pieces.optimizers.values():
            self._fit_optimizer(binding, by_name, rates, dtypes)
        rates.finish()
        for key, one in self._program.statefuls.items():
            if one is None or key.partition("/")[0] == "lr_scheduler":
                continue
            if key in added or self._choices.answered(key):
                StatefulPart(self._store, f"{self._name}/{key}", one).capture()
        if "rng" in added:
            self._pieces.rng.capture()
        self._fit_loader("loader" in added)
        if self._choices.hit("attributes", "program", "attributes"):
            take_given(self._store, f"{self._name}/attributes", self._program.models)
        self._pieces.find_parameters()
        if self._choices.hit("trainable", "program", "trainable"):
            self._pieces.trainable.capture()
        if self._pieces.gradients is not None:
            self._pieces.gradients.fit()

    # ---- the model

    def _stored_dtypes(self) -> dict[str, torch.dtype]:
        layout = self._store.get(f"{self._name}/model_layout") or {}
        return {name: getattr(torch, place[2]) for name, place in layout.items()}

    def _fit_model(self, by_name: bool) -> None:
        binding = self._pieces.model
        if binding is None:
            return
        if f"{self._name}/model_layout" not in self._store:
            binding.create()
        elif by_name:
            binding.fit()

    def _converted(self, dtypes: Mapping[str, torch.dtype]) -> bool:
        """Whether a tensor has another dtype than was stored."""
        now = self._stored_dtypes()
        return any(now.get(name, dtype) != dtype for name, dtype in dtypes.items())

    # ---- optimizers

    def _fit_optimizer(
        self,
        binding: OptimizerBinding,
        by_name: bool,
        rates: Rates,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        piece, optimizer = binding.piece, binding.optimizer
        path = f"{self._name}/{piece}"
        if f"{path}/layout" not in self._store:
            binding.create()
            return
        fresh = self._choices.hit("optimizer", "program", piece)
        described = self._store[f"{path}/layout"][0]
        before, names = names_of(described), names_of(binding.describe_groups())
        other = described != binding.describe_groups() or (by_name and self._converted(dtypes))
        if other and not (fresh or by_name or self._choices.regrouped):
            return  # `check` says what is different
        if other and not fresh and read_layout(self._store, path)[3]:
            raise AttachError(
                f"the state of {binding.called} lies in parts at several ranks (DTensors), which "
                f"cannot be taken by name: {HOW_TO_RESHARD}; or "
                'Resume(optimizer="program") begins without state'
            )
        held = self._read(path, before, described, dtypes)
        groups = rates.of_groups(piece, optimizer, names, held, fresh)
        if not (fresh or other):
            Structure(self._store, f"{path}/groups").write(groups)
            return
        self._refuse_slots(binding, described)
        if fresh:
            held.state.clear()
            held.others.clear()
        binding = binding.beside(stand_in(optimizer, names, held, groups))
        flat = [name for group in names for name in group]
        self._store.pop(path, None)
        binding.create()
        for name, index in zip(flat, range(len(flat)), strict=True):
            if name in held.own and f"{path}/parameters/{index}" in self._store:
                copy_common(self._store[f"{path}/parameters/{index}"], held.own[name])

    def _refuse_slots(self, binding: OptimizerBinding, described: list[dict[str, Any]]) -> None:
        stored = described[0]["class"] if described else ""
        if isinstance(binding.optimizer, NativeOptimizer) or stored.startswith("pmstore."):
            raise AttachError(
                "the optimizers of pmstore.torch.optim keep parameters and state in one piece, "
                "which cannot be taken in part. Begin a run with another name from the stored "
                "model: pmstore.torch.load(store, model), then attach(..., name=...)"
            )

    def _read(
        self,
        path: str,
        names: list[list[str]],
        described: list[dict[str, Any]],
        dtypes: Mapping[str, torch.dtype],
    ) -> HeldOptimizer:
        _, tensors, own, _ = read_layout(self._store, path)
        flat = [name for group in names for name in group]
        shapes = [shape for group in described for shape in group["shapes"]]
        rest = Structure(self._store, f"{path}/rest").read()
        state: dict[str, dict[str, Any]] = {
            flat[index]: dict(plain) for index, plain in rest.items() if index != "others"
        }
        for index, key in tensors:
            value = self._store[f"{path}/state/{index}.{encode_name(key)}"]
            state.setdefault(flat[index], {})[key] = value.clone()
        return HeldOptimizer(
            Structure(self._store, f"{path}/groups").read(),
            names,
            dict(zip(flat, shapes, strict=True)),
            dict(dtypes),
            state,
            rest.get("others", {}),
            {flat[index]: self._store[f"{path}/parameters/{index}"].clone() for index in own},
        )

    # ---- the place in the data

    def _fit_loader(self, added: bool) -> None:
        loader = self._pieces.loader
        if loader is None:
            return
        path = f"{self._name}/loader"
        progress = Progress.open(self._store, self._name)
        progress.restore()
        position = progress.place.done
        if added or self._choices.hit("data", "next epoch", "loader"):
            if position.batch:
                position = Position(position.data_epoch + 1)
            if added or not loader.fits():
                self._store.pop(path, None)
                loader.capture(Place(position))
            else:
                Structure(self._store, f"{path}/start").write(None)
                self._store.pop(f"{path}/state", None)
        elif self._choices.hit("batch_size", "samples", "loader"):
            position = keep_samples(
                self._store, path, position, self._settings["loader"], self._program.loader
            )
        else:
            return
        # what the program held is of batches that do not come as they were
        self._store.pop(f"{path}/held", None)
        progress.place.restore(position)
        progress.capture(progress.finished)


def note(store: Store, name: str, program: Program, resume: Resume) -> None:
    """What the program gives, and what it chose; pending until the next commit."""
    store[f"{name}/given"] = {"settings": fingerprint(program), "resume": resume.chosen()}


def adapt(store: Store, name: str, program: Program, resume: Resume) -> list[list[str]]:
    """Compares the program with what it was, and does what was chosen. What was done is durable on
    return; where there is nothing to do, nothing is written. The program is untouched.

    Returns: the settings that are different: what, the stored and the given value, and the choice.

    Raises:
        MismatchError: there are other pieces than were stored, or what is stored of one cannot be
            made to fit.
        ChangedError: settings are different, and nothing was chosen.
        In every case the store is as before.
    """
    noted: dict[str, Any] = store.get(f"{name}/given") or {}
    stored: Mapping[str, Settings] = noted.get("settings", {})
    given, chosen = fingerprint(program), resume.chosen()
    changed = conflicts(store, f"{name}/attributes", program.models)
    stored = {**stored, "attributes": {describe(at): was for at, (was, _) in changed.items()}}
    given["attributes"] = {describe(at): now for at, (_, now) in changed.items()}
    missing, unexpected = _other_pieces(store, name, program, chosen)
    differences = compare(stored, given, {})
    if differences:
        differences = compare(stored, given, _now(store, name, stored))
    choices = Choices(resume, noted.get("resume", {}), differences)
    if choices.unanswered:
        raise ChangedError(
            f"the program gives other settings than it gave when the run {name!r} was last "
            "attached, and the stored ones would count. Say which shall, in "
            "attach(..., resume=pmstore.torch.Resume(...))",
            mismatched=map(str, choices.unanswered),
        )
    about = store[f"{name}/about"]
    newest = about["format"] == program.format
    known = newest and noted.get("resume") == chosen and not has_more(stored, given)
    if known and not (missing or unexpected or differences or choices.by_name):
        return []
    fitting = Fitting(store, name, program, choices, stored)
    try:
        if known and not (missing or unexpected or differences or fitting.needed):
            return []
        with store.transaction():
            fitting.fit(missing, unexpected)
            if "loops" in chosen and "loops" not in noted.get("resume", {}):
                Progress.forget_loops(store, name)
            store[f"{name}/about"] = {**about, "format": program.format, "pieces": program.given()}
            note(store, name, program, resume)
            fitting.check()
    finally:
        fitting.release()
    return choices.told()


def _other_pieces(
    store: Store, name: str, program: Program, chosen: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Which are stored and not given, and the other way round."""
    stored, given = store[f"{name}/about"]["pieces"], program.given()
    missing = [piece for piece, there in stored.items() if there and not given.get(piece)]
    unexpected = [piece for piece, there in given.items() if there and not stored.get(piece)]
    if "mirror" in (*missing, *unexpected):
        raise MismatchError(
            f"the stored run {name!r} is {'' if stored['mirror'] else 'not '}mirrored, and so it "
            "stays: attach(..., mirror=...) says how. Or begin a run with another name from it: "
            "pmstore.torch.load(store, model) first, then attach(..., name=...)",
            missing=missing,
            unexpected=unexpected,
        )
    left = [
        piece
        for piece in (*missing, *unexpected)
        if "pieces" not in chosen and not ("model" in chosen and piece.startswith("model"))
    ]
    if left:
        raise MismatchError(
            f"the stored run {name!r} has other pieces than were given to attach",
            missing=_among(missing, left),
            unexpected=_among(unexpected, left),
            ways=(
                'Resume(pieces="program") drops what is not given; what is not stored begins anew',
            ),
        )
    return missing, unexpected


def _among(pieces: list[str], left: Iterable[str]) -> list[str]:
    return [piece for piece in pieces if piece in left]


def _now(store: Store, name: str, stored: Mapping[str, Settings]) -> dict[str, Settings]:
    """What the training made of the optimizers' hyperparameters, and of what is trained."""
    found: dict[str, Settings] = {}
    for piece in stored:
        groups = Structure(store, f"{name}/{piece}/groups")
        if piece.partition("/")[0] == "optimizer" and groups.stored:
            found[piece] = {
                "groups": [
                    {key: plain(value) for key, value in group.items()} for group in groups.read()
                ]
            }
    names = list(stored.get("trainable", ()))
    found["trainable"] = dict(read_trainable(store, f"{name}/trainable", names))
    return found
